"""Small clusters to emulate, and what there is of an emulation on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.emulation import namespaces, state
from hetplan.emulation.tools import missing
from hetplan.emulation.values import NAMESPACE_PREFIX, key_of

ROOT = Path(__file__).resolve().parents[2]
FOUR_HOSTS = ROOT / "configs/clusters/emulated-two-regions.yaml"
HERE = Path(__file__).parent

needs_machine = pytest.mark.skipif(
    bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}"
)
"""Root, namespaces, TAP, ip and tc."""

# Every program that runs in a test finds hetplan where the tests have it.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def four_hosts() -> Cluster:
    return load_cluster(FOUR_HOSTS)


def cluster_text(regions: int = 2, hosts: int = 2, devices: int = 1, link: str = "") -> str:
    """So many regions of one island each, joined at 100 Mbit/s and 20 ms there and back."""
    link = link or "{bandwidth_shared: 100 Mbit/s, round_trip: 20 ms}"
    lines = ["schema: hetplan.cluster/2", "name: made", "regions:"]
    for region in range(regions):
        lines += [
            f"  - name: region{region}",
            "    islands:",
            f"      - name: island{region}",
            "        device: cpu",
            f"        nodes: {hosts}",
            f"        devices_per_node: {devices}",
            "        memory: 1 GiB",
            "        intra_node: {bandwidth: 1 GB/s, latency: 50 us}",
            "        inter_node: {bandwidth: 1 Gbit/s, latency: 50 us}",
            f'        node_names: ["r{region}h[1-{hosts}]"]',
        ]
    if regions > 1:
        lines += ["links_default:", f"  across_regions: {link}"]
    return "\n".join(lines) + "\n"


def write_cluster(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Traces:
    """What the machine has of an emulation, and what emulations must not change."""

    namespaces: tuple[str, ...]
    processes: tuple[str, ...]
    links: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    mounts: tuple[str, ...]
    folder: bool


_VOLATILE = ("conntrack_count", "/neigh/", "fib_sync_mem", "dccp")


def traces(name: str) -> Traces:
    key = key_of(name)
    return Traces(
        namespaces=tuple(
            each for each in namespaces.names() if each.startswith(f"{NAMESPACE_PREFIX}{key}")
        ),
        processes=_processes(name, key),
        links=tuple(sorted(os.listdir("/sys/class/net"))),
        settings=_settings(),
        mounts=tuple(
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if key in line
        ),
        folder=(state.FOLDER / key).exists(),
    )


def _processes(name: str, key: str) -> tuple[str, ...]:
    """The programs of this emulation, whichever namespace they are in."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        ours = any(word.startswith("hetplan.emulation.") for word in words)
        if ours and (name in words or any(key in word for word in words)):
            found.append(" ".join(words))
    return tuple(sorted(found))


def _settings() -> tuple[tuple[str, str], ...]:
    found = []
    for path in sorted(Path("/proc/sys/net").rglob("*")):
        if any(part in str(path) for part in _VOLATILE):
            continue
        try:
            if path.is_file():
                found.append((str(path), path.read_text()))
        except OSError:
            continue
    return tuple(found)


def hetplan(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        (sys.executable, "-m", "hetplan", *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=ENVIRONMENT,
    )
