"""A look at a machine: from what a Probe reads to a MachineReport. It never raises for a machine.

Each part is looked at by itself: one that goes wrong leaves its part empty and one line in
`problems`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.machine.devices import find_devices
from hetplan.machine.measurable import find_advice, find_measurements, find_tools
from hetplan.machine.network import find_interfaces, find_rdma
from hetplan.machine.probe import TORCH_SECONDS, AnswerState, Probe
from hetplan.machine.stores import find_stores
from hetplan.machine.system import find_limits, find_processor
from hetplan.machine.torch_text import NO_TORCH, TorchAnswer, parse_torch
from hetplan.machine.values import (
    MachineDevice,
    MachineInterface,
    MachineMeasurement,
    MachineRdma,
    MachineReport,
    MachineStore,
    MachineTool,
)

_T = TypeVar("_T")


class _Parts:
    """Parts of a report, each looked at by itself."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def of(self, name: str, find: Callable[[], _T], otherwise: _T) -> _T:
        """What `find` finds; `otherwise`, and a problem, where it goes wrong."""
        try:
            return find()
        except Exception as error:  # a doctor that falls ill is no help
            self._problems.append(f"{name}: not understood ({type(error).__name__})")
            return otherwise


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
    part = _Parts(wrong).of
    seen = part("torch", lambda: _torch(probe, python, wrong), _NOTHING)
    devices = part(
        "devices",
        lambda: find_devices(probe, seen.devices, kinds, wrong),
        tuple[MachineDevice, ...](),
    )
    interfaces = part("network", lambda: find_interfaces(probe), tuple[MachineInterface, ...]())
    rdma = part("RDMA", lambda: find_rdma(probe), tuple[MachineRdma, ...]())
    tools = part("tools", lambda: find_tools(probe, devices), tuple[MachineTool, ...]())
    limits = find_limits(probe)
    return MachineReport(
        system=_system(),
        processor=find_processor(probe),
        devices=devices,
        torch=seen.torch,
        interfaces=interfaces,
        rdma=rdma,
        limits=limits,
        tools=tools,
        stores=part(
            "profile stores", lambda: find_stores(stores, wrong), tuple[MachineStore, ...]()
        ),
        measurements=part(
            "what can be measured",
            lambda: find_measurements(
                devices=devices, torch=seen.torch, interfaces=interfaces, rdma=rdma, tools=tools
            ),
            tuple[MachineMeasurement, ...](),
        ),
        advice=find_advice(devices=devices, rdma=rdma, limits=limits),
        problems=tuple(wrong),
    )


def _system() -> str:
    # A kernel's release may end in the name of whoever built it for this machine.
    release = re.match(r"[\d.]+", platform.release())
    return f"{platform.system()} {release.group(0).rstrip('.') if release else ''}".strip()


_NOTHING = TorchAnswer(torch=NO_TORCH, devices=())


def _torch(probe: Probe, python: str, problems: list[str]) -> TorchAnswer:
    answer = probe.run((python, "-m", "hetplan.machine.torch_child"), TORCH_SECONDS)
    seen = parse_torch(answer.text)
    if seen is not None:
        return seen
    reason = answer.reason or (
        "its answer was not understood" if answer.state is AnswerState.DONE else "it did not start"
    )
    problems.append(
        f"torch: cannot be imported or asked ({reason}); try `python -c 'import torch'`"
    )
    return _NOTHING
