"""A machine made of files and answers: a tree of /proc and /sys, and programs that answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hetplan.machine.host import Answer, AnswerState, Probe
from hetplan.machine.torch_child import MARK

MAC = "b8:3f:d2:11:22:33"
HOST = "secret-host-17"
ADDRESS = "10.20.30.40"


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def interface(root: Path, name: str, *, state: str, speed: str, driver: str, kind: str = "1"):
    place = f"sys/class/net/{name}"
    put(root, f"{place}/operstate", f"{state}\n")
    put(root, f"{place}/speed", f"{speed}\n")
    put(root, f"{place}/type", f"{kind}\n")
    put(root, f"{place}/address", f"{MAC}\n")
    if driver:
        put(root, f"drivers/{driver}/bind", "")
        (root / place / "device").mkdir()
        (root / place / "device" / "driver").symlink_to(root / "drivers" / driver)


def rdma(root: Path, name: str, *, state: str, rate: str, layer: str, numa: int):
    place = f"sys/class/infiniband/{name}"
    put(root, f"{place}/ports/1/state", f"{state}\n")
    put(root, f"{place}/ports/1/rate", f"{rate}\n")
    put(root, f"{place}/ports/1/link_layer", f"{layer}\n")
    put(root, f"{place}/device/numa_node", f"{numa}\n")
    put(root, f"{place}/node_guid", f"{MAC}\n")


def big_node(root: Path) -> None:
    """Two sockets, eight rails of InfiniBand, one slow card, in a small container."""
    put(root, "proc/meminfo", "MemTotal:  1056764928 kB\nMemAvailable:  1000000000 kB\n")
    put(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Acme Server CPU  9000\n")
    put(root, "proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-15,96-111\n")
    put(root, "proc/sys/kernel/hostname", f"{HOST}\n")
    put(root, "etc/hostname", f"{HOST}\n")
    put(root, "sys/devices/system/cpu/online", "0-191\n")
    put(root, "sys/devices/system/node/online", "0-1\n")
    put(root, "sys/fs/cgroup/cpu.max", "1600000 100000\n")
    put(root, "sys/fs/cgroup/memory.max", "137438953472\n")
    put(
        root,
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         65536                65536                bytes     \n"
        "Max open files            1024                 4096                 files     \n",
    )
    put(root, "proc/1/cgroup", f"0::/kubepods/besteffort/pod{HOST}\n")
    put(root, "proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 0 - Live 0x0\n")
    put(root, "dev/shm/.keep", "")
    for rail in range(8):
        interface(root, f"ib{rail}", state="up", speed="400000", driver="mlx5_core", kind="32")
        rdma(
            root,
            f"mlx5_{rail}",
            state="4: ACTIVE",
            rate="400 Gb/sec (4X NDR)",
            layer="InfiniBand",
            numa=rail // 4,
        )
        put(root, f"dev/infiniband/uverbs{rail}", "")
    rdma(root, "mlx5_8", state="1: DOWN", rate="25 Gb/sec (1X EDR)", layer="Ethernet", numa=-1)
    interface(root, "enxb83fd2112233", state="down", speed="-1", driver="cdc_ether")
    interface(root, "eth0", state="up", speed="25000", driver="bnxt_en")
    interface(root, "docker0", state="down", speed="", driver="")
    interface(root, "lo", state="unknown", speed="", driver="", kind="772")
    put(root, "sys/class/net/bonding_masters", "")


def torch_answer(devices: Sequence[tuple[str, str, int]] = (), version: str = "2.8.0") -> str:
    found = {
        "version": version,
        "runtime": "cuda 12.8",
        "backends": ["gloo", "nccl"],
        "devices": [{"type": kind, "name": name, "memory": size} for kind, name, size in devices],
    }
    return f"a warning that names {HOST}\n{MARK}{json.dumps(found)}\n"


def probe(
    root: Path,
    answers: dict[str, str | Answer] | None = None,
    *,
    present: Sequence[str] = (),
    shared_bytes: float = 64 * 2.0**20,
) -> Probe:
    """A probe of the tree; `answers`: what each program prints; `python`'s is torch's."""
    known = {"python": torch_answer()} | (answers or {})

    def run(arguments: Sequence[str], seconds: float) -> Answer:
        answer = known.get(arguments[0])
        if answer is None:
            return Answer(state=AnswerState.MISSING)
        return Answer(state=AnswerState.DONE, text=answer) if isinstance(answer, str) else answer

    return Probe(
        root=root,
        run=run,
        find=lambda name: name in known or name in present,
        space=lambda path: shared_bytes,
    )
