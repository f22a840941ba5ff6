"""A look at a machine: from what a Probe reads to a MachineReport. It never raises for a machine.

Each part is looked at by itself: one that goes wrong leaves its part empty and one line in
`problems`. With the parts: what hetplan can measure here, what is missing for the rest, and how to
get it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.machine.devices import DRIVER_TOOLS, find_devices, find_torch
from hetplan.machine.host import Probe, find_interfaces, find_processor, find_rdma
from hetplan.machine.report import (
    MachineDevice,
    MachineInterface,
    MachineMeasurement,
    MachineRdma,
    MachineReport,
    MachineTorch,
)

_T = TypeVar("_T")


def look(
    probe: Probe,
    *,
    kinds: Sequence[DeviceKind],
    python: str,
    problems: Sequence[str] = (),
) -> MachineReport:
    """What the probe's machine has.

    `python`: the interpreter whose torch is asked; `problems`: what the caller could not look at.
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
    return MachineReport(
        system=_system(),
        processor=find_processor(probe),
        devices=devices,
        torch=torch,
        interfaces=interfaces,
        rdma=rdma,
        measurements=find_measurements(
            probe, devices=devices, torch=torch, interfaces=interfaces, rdma=rdma
        ),
        problems=tuple(wrong),
    )


def _system() -> str:
    # A kernel's release may end in the name of whoever built it for this machine.
    release = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {release.group(0).rstrip('.') if release else ''}".strip()


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


def find_measurements(
    probe: Probe,
    *,
    devices: Sequence[MachineDevice],
    torch: MachineTorch,
    interfaces: Sequence[MachineInterface],
    rdma: Sequence[MachineRdma],
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

    def by_tool(what: str, name: str, get: str, importer: str) -> MachineMeasurement:
        if probe.find(name):
            how = f"{name} between the nodes, then hetplan import {importer} FILE"
            return MachineMeasurement(what=what, possible=True, how=how)
        return _not(what, f"missing: {name}; {get}")

    amd = any(device.tool in ("rocm-smi", "hy-smi") for device in devices)
    tests = "github.com/ROCm/rccl-tests" if amd else "github.com/NVIDIA/nccl-tests"
    active = any(port.state == "ACTIVE" for port in rdma)
    wired = any(each.physical and each.state == "up" for each in interfaces)
    found += [
        by_tool("collectives with nccl-tests", "all_reduce_perf", f"build {tests}", "samples")
        if any(device.torch_device == "cuda" for device in devices)
        else _not("collectives with nccl-tests", "needs CUDA or ROCm devices that torch sees"),
        by_tool("RDMA between nodes", "ib_write_bw", "apt install perftest", "links")
        if active
        else _not("RDMA between nodes", "no active RDMA port was found"),
        by_tool("TCP between nodes", "iperf3", "apt install iperf3", "links")
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
