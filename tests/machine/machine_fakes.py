"""A machine made of files and answers: a tree of /proc and /sys, and programs that answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hetplan.machine.devices import TORCH_MARK
from hetplan.machine.host import Answer, AnswerState, Probe

MAC = "b8:3f:d2:11:22:33"
HOST = "secret-host-17"
ADDRESS = "10.20.30.40"


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hetplan doctor` as a user runs it, without that user's own device kinds."""
    return subprocess.run(
        [sys.executable, "-m", "hetplan", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"XDG_CONFIG_HOME": "/nonexistent"} | environment,
    )


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def rdma(root: Path, name: str, *, state: str, rate: str, layer: str, numa: int) -> None:
    place = f"sys/class/infiniband/{name}"
    put(root, f"{place}/ports/1/state", f"{state}\n")
    put(root, f"{place}/ports/1/rate", f"{rate}\n")
    put(root, f"{place}/ports/1/link_layer", f"{layer}\n")
    put(root, f"{place}/device/numa_node", f"{numa}\n")
    put(root, f"{place}/node_guid", f"{MAC}\n")


def big_node(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets, eight rails of InfiniBand, one slow card, in a small container."""
    put(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Acme Server CPU  9000\n")
    put(root, "proc/sys/kernel/hostname", f"{HOST}\n")
    put(root, "etc/hostname", f"{HOST}\n")
    put(root, "sys/devices/system/node/node0/meminfo", "")
    put(root, "sys/devices/system/node/node1/meminfo", "")
    put(root, "sys/fs/cgroup/cpu.max", "1600000 100000\n")
    put(root, "sys/fs/cgroup/memory.max", "137438953472\n")
    drivers = {"eth0": "bnxt_en", "enxb83fd2112233": "cdc_ether"}
    stats = {
        "eth0": SimpleNamespace(isup=True, speed=25000, flags="up"),
        "enxb83fd2112233": SimpleNamespace(isup=False, speed=0, flags=""),
        "docker0": SimpleNamespace(isup=False, speed=0, flags=""),
        "lo": SimpleNamespace(isup=True, speed=0, flags="up,loopback"),
    }
    for rail in range(8):
        drivers[f"ib{rail}"] = "mlx5_core"
        stats[f"ib{rail}"] = SimpleNamespace(isup=True, speed=400000, flags="up")
        rate = "400 Gb/sec (4X NDR)"
        numa = rail // 4
        name = f"mlx5_{rail}"
        rdma(root, name, state="4: ACTIVE", rate=rate, layer="InfiniBand", numa=numa)
    rdma(root, "mlx5_8", state="1: DOWN", rate="25 Gb/sec (1X EDR)", layer="Ethernet", numa=-1)
    for name, driver in drivers.items():
        put(root, f"drivers/{driver}/bind", "")
        (root / f"sys/class/net/{name}/device").mkdir(parents=True)
        (root / f"sys/class/net/{name}/device/driver").symlink_to(root / "drivers" / driver)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 192)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(32)))
    memory = SimpleNamespace(total=2**40, available=2**39)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def torch_answer(devices: Sequence[tuple[str, str, int]] = ()) -> str:
    found = {
        "version": "2.8.0",
        "runtime": "cuda 12.8",
        "backends": ["gloo", "nccl"],
        "devices": devices,
    }
    return f"a warning that names {HOST}\n{TORCH_MARK}{json.dumps(found)}\n"


def probe(
    root: Path, answers: dict[str, str | Answer] | None = None, *, present: Sequence[str] = ()
) -> Probe:
    """A probe of the tree; `answers`: what each program prints; `python`'s is torch's."""
    known = {"python": torch_answer()} | (answers or {})

    def run(arguments: Sequence[str], seconds: float) -> Answer:
        answer = known.get(arguments[0])
        if answer is None:
            return Answer(state=AnswerState.MISSING)
        return Answer(state=AnswerState.DONE, text=answer) if isinstance(answer, str) else answer

    return Probe(root=root, run=run, find=lambda name: name in known or name in present)
