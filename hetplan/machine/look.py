"""A look at a machine: from what a Probe reads to a MachineReport. It never raises for a machine.

Each part is looked at by itself: one that goes wrong leaves its part empty and one line in
`problems`. With the parts: what hetplan can measure here, what is missing for the rest, and how to
get it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import HetplanError
from hetplan.files.shipped import shipped_folder
from hetplan.machine.devices import DRIVER_TOOLS, find_devices, find_torch
from hetplan.machine.host import Probe, find_interfaces, find_limits, find_processor, find_rdma
from hetplan.machine.report import (
    MachineDevice,
    MachineInterface,
    MachineLimits,
    MachineMeasurement,
    MachineRdma,
    MachineReport,
    MachineStore,
    MachineTool,
    MachineTorch,
)
from hetplan.profiling.store import read_populations

_T = TypeVar("_T")


def look(
    probe: Probe,
    *,
    kinds: Sequence[DeviceKind],
    python: str,
    stores: Sequence[Path],
    problems: Sequence[str] = (),
) -> MachineReport:
    """What the probe's machine has.

    `python`: the interpreter whose torch is asked; `stores`: profile stores to look into;
    `problems`: what the caller could not look at.
    """
    wrong = list(problems)

    def part(name: str, find: Callable[[], tuple[_T, ...]]) -> tuple[_T, ...]:
        """What `find` finds; nothing, and a problem, where it goes wrong."""
        try:
            return find()
        except Exception as error:  # a doctor that falls ill is no help
            wrong.append(f"{name}: not understood ({type(error).__name__})")
            return ()

    torch, seen = find_torch(probe, python, wrong)
    devices = part("devices", lambda: find_devices(probe, seen, kinds, wrong))
    interfaces = part("network", lambda: find_interfaces(probe))
    rdma = part("RDMA", lambda: find_rdma(probe))
    tools = find_tools(probe, devices)
    limits = find_limits(probe)
    return MachineReport(
        system=_system(),
        processor=find_processor(probe),
        devices=devices,
        torch=torch,
        interfaces=interfaces,
        rdma=rdma,
        limits=limits,
        tools=tools,
        stores=part("profile stores", lambda: find_stores(stores, wrong)),
        measurements=find_measurements(
            devices=devices, torch=torch, interfaces=interfaces, rdma=rdma, tools=tools
        ),
        advice=find_advice(devices=devices, rdma=rdma, limits=limits),
        problems=tuple(wrong),
    )


def _system() -> str:
    # A kernel's release may end in the name of whoever built it for this machine.
    release = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {release.group(0).rstrip('.') if release else ''}".strip()


_GIB = float(2**30)
# NCCL moves data between processes of a node through /dev/shm where devices cannot reach each
# other; docker's default of 64 MiB is too little for eight of them.
_MIN_SHARED_BYTES = 1 * _GIB

# How torch gets to know a vendor's devices: each vendor's own install page names these.
_TORCH_FOR = {
    "nvidia": "a CUDA build of torch: pip install torch",
    "amd": "a ROCm build of torch: pip install torch --index-url (pytorch.org shows it)",
    "hygon": "Hygon's torch of its DTK image",
    "huawei": "CANN and pip install torch_npu",
    "cambricon": "the vendor's image with torch_mlu",
    "moore-threads": "the vendor's image with torch_musa",
    "iluvatar": "the vendor's torch of its CoreX image",
    "intel": "an XPU build of torch, or the Gaudi image with habana_frameworks",
}
MEASURED_TYPES = ("cuda", "npu", "mlu", "musa", "xpu", "hpu", "gcu")
"""Device types that `hetplan profile` opens; asking its plug-ins would import torch."""


def find_tools(probe: Probe, devices: Sequence[MachineDevice]) -> tuple[MachineTool, ...]:
    """The programs whose output `hetplan import` reads, and whether they are here."""
    amd = any(device.tool in ("rocm-smi", "hy-smi") for device in devices)
    tests = "rccl-tests" if amd else "nccl-tests"
    owner = "ROCm" if amd else "NVIDIA"
    wanted = (
        ("all_reduce_perf", f"collectives ({tests})", f"build github.com/{owner}/{tests}"),
        ("ib_write_bw", "RDMA links (perftest)", "apt install perftest"),
        ("iperf3", "TCP links between nodes", "apt install iperf3"),
    )
    return tuple(
        MachineTool(name=name, present=probe.find(name), purpose=purpose, get=get)
        for name, purpose, get in wanted
    )


def find_measurements(
    *,
    devices: Sequence[MachineDevice],
    torch: MachineTorch,
    interfaces: Sequence[MachineInterface],
    rdma: Sequence[MachineRdma],
    tools: Sequence[MachineTool],
) -> tuple[MachineMeasurement, ...]:
    """One line per kind of measurement, possible or not."""
    with_torch = bool(torch.version)
    found = [
        MachineMeasurement(
            what="layers on a CPU core",
            possible=with_torch,
            how="hetplan profile layers --device cpu"
            if with_torch
            else "missing: pip install torch",
        )
    ]
    found += [_layers(device) for device in devices]
    if not devices:
        how = "no accelerator was found, by torch or by a driver's tool"
        found.append(_not("layers on an accelerator", how))
    found += _links(devices, torch)
    present = {tool.name: tool for tool in tools}
    active = any(port.state == "ACTIVE" for port in rdma)
    wired = any(each.physical and each.state == "up" for each in interfaces)
    found += [
        _by_tool("collectives with nccl-tests", present["all_reduce_perf"], "nccl-tests")
        if any(device.torch_device == "cuda" for device in devices)
        else _not("collectives with nccl-tests", "needs CUDA or ROCm devices that torch sees"),
        _by_tool("RDMA between nodes", present["ib_write_bw"], "perftest")
        if active
        else _not("RDMA between nodes", "no active RDMA port was found"),
        _by_tool("TCP between nodes", present["iperf3"], "iperf3")
        if wired or active
        else _not("TCP between nodes", "no wired interface that is up was found"),
    ]
    return tuple(found)


def _not(what: str, why: str) -> MachineMeasurement:
    return MachineMeasurement(what=what, possible=False, how=why)


def _layers(device: MachineDevice) -> MachineMeasurement:
    what = f"layers on {device.name}"
    if device.torch_device in MEASURED_TYPES:
        kind = f" --kind {device.kind}" if device.kind else ""
        how = f"hetplan profile layers --device {device.torch_device}{kind}"
        return MachineMeasurement(what=what, possible=True, how=how)
    if device.torch_device:
        return _not(what, f"hetplan cannot measure torch's {device.torch_device} devices")
    vendor = next((tool.vendor for tool in DRIVER_TOOLS if tool.name == device.tool), "")
    need = _TORCH_FOR.get(vendor, "the vendor's build of torch")
    return _not(what, f"missing: torch does not see it; install {need}")


def _links(devices: Sequence[MachineDevice], torch: MachineTorch) -> list[MachineMeasurement]:
    """Links between the devices of this node, and gloo over the loopback."""
    found = []
    seen = [device for device in devices if device.torch_device in MEASURED_TYPES]
    for device in seen:
        if device.count > 1:
            how = (
                f"torchrun --standalone --nproc-per-node {device.count} -m hetplan profile "
                f"links NAME --device {device.torch_device}"
            )
            what = f"links between the {device.count} devices"
            found.append(MachineMeasurement(what=what, possible=True, how=how))
    if not seen:
        gloo = "gloo" in torch.backends
        how = "torchrun --standalone --nproc-per-node 2 -m hetplan profile links loopback"
        found.append(
            MachineMeasurement(
                what="links between processes (gloo)",
                possible=gloo,
                how=how if gloo else "missing: a torch with torch.distributed and gloo",
            )
        )
    return found


def _by_tool(what: str, tool: MachineTool, importer: str) -> MachineMeasurement:
    if tool.present:
        how = f"{tool.name} between the nodes, then hetplan import {importer} FILE"
        return MachineMeasurement(what=what, possible=True, how=how)
    return _not(what, f"missing: {tool.name}; {tool.get}")


def find_advice(
    *, devices: Sequence[MachineDevice], rdma: Sequence[MachineRdma], limits: MachineLimits
) -> tuple[str, ...]:
    """Limits of this container or login that would hold a training run up."""
    found = []
    if devices and 0 < limits.shared_memory_bytes < _MIN_SHARED_BYTES:
        mib = limits.shared_memory_bytes / 2**20
        found.append(
            f"/dev/shm has {mib:.0f} MiB, collectives inside a node want more: start the "
            "container with --shm-size=16g"
        )
    active = any(port.state == "ACTIVE" for port in rdma)
    if active and not limits.rdma_visible:
        found.append(
            "RDMA ports are active and /dev/infiniband is not here: start the container with "
            "--device=/dev/infiniband"
        )
    if active and not limits.locked_unlimited:
        found.append(
            "RDMA pins memory and the limit is "
            f"{limits.locked_memory_bytes / 2**20:.3g} MiB: ulimit -l unlimited, or docker run "
            "--ulimit memlock=-1"
        )
    nvidia = any(device.tool == "nvidia-smi" for device in devices)
    if active and nvidia and not limits.gpu_direct:
        found.append(
            "no module for RDMA from GPU memory is loaded: modprobe nvidia_peermem (newer drivers "
            "can use dma-buf instead)"
        )
    return tuple(found)


def find_stores(folders: Sequence[Path], problems: list[str]) -> tuple[MachineStore, ...]:
    """What each folder holds; one that cannot be read is a problem, not an error."""
    found = []
    for folder in folders:
        place = _place(folder)
        try:
            populations = read_populations(folder) if folder.is_dir() else ()
        except (HetplanError, OSError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            problems.append(f"{place}: cannot be read: {first.replace(str(folder), place)}")
            continue
        links = {sample.link for each in populations for sample in each.links}
        kinds = {
            provenance.device
            for each in populations
            if each.layers or each.operators
            for provenance in each.provenance
        }
        found.append(
            MachineStore(
                place=place,
                kinds=tuple(sorted(kinds)),
                links=tuple(sorted(links)),
                samples=sum(
                    len(each.layers) + len(each.operators) + len(each.links) for each in populations
                ),
            )
        )
    return tuple(found)


def _place(folder: Path) -> str:
    """The folder with `~` for the home folder, whose name may be its owner's."""
    if folder == shipped_folder("profiles"):
        return "shipped with hetplan"
    try:
        return f"~/{folder.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(folder)
