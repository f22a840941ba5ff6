"""Which network interfaces and RDMA ports are here, those that look alike together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetplan.machine.probe import Probe
from hetplan.machine.system_text import (
    number,
    port_bits_per_second,
    port_state,
    speed_bits_per_second,
    without_addresses,
)
from hetplan.machine.values import MachineInterface, MachineRdma

_NET = "sys/class/net"
_RDMA = "sys/class/infiniband"
_LOOPBACK = "772"  # ARPHRD_LOOPBACK of linux/if_arp.h


def find_interfaces(probe: Probe) -> tuple[MachineInterface, ...]:
    """Interfaces of /sys/class/net without the loopback, the fastest first."""
    groups: dict[tuple[bool, str, float, str], list[str]] = {}
    for name in probe.names(_NET):
        place = f"{_NET}/{name}"
        if probe.text(f"{place}/type").strip() == _LOOPBACK or name == "lo":
            continue
        if not probe.exists(f"{place}/operstate"):
            continue  # bonding_masters is a file in that folder
        physical = probe.exists(f"{place}/device")
        key = (
            physical,
            probe.text(f"{place}/operstate").strip()[:16] or "unknown",
            speed_bits_per_second(probe.text(f"{place}/speed")),
            probe.link_name(f"{place}/device/driver")[:32],
        )
        groups.setdefault(key, []).append(without_addresses(name))
    found = (
        MachineInterface(
            names=tuple(names),
            state=state,
            bits_per_second=speed,
            driver=driver,
            physical=physical,
        )
        for (physical, state, speed, driver), names in groups.items()
    )
    return tuple(
        sorted(
            found,
            key=lambda each: (not each.physical, -each.bits_per_second, each.state, each.names),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    device: str
    state: str
    bits_per_second: float
    link_layer: str
    numa_node: int


def find_rdma(probe: Probe) -> tuple[MachineRdma, ...]:
    """Ports of /sys/class/infiniband, the active and fast ones first."""
    groups: dict[tuple[str, float, str], list[_Port]] = {}
    for port in _ports(probe):
        groups.setdefault((port.state, port.bits_per_second, port.link_layer), []).append(port)
    found = (
        MachineRdma(
            devices=tuple(dict.fromkeys(port.device for port in ports)),
            state=state,
            bits_per_second=speed,
            link_layer=layer,
            numa_nodes=tuple(sorted({port.numa_node for port in ports if port.numa_node >= 0})),
        )
        for (state, speed, layer), ports in groups.items()
    )
    return tuple(sorted(found, key=lambda each: (each.state != "ACTIVE", -each.bits_per_second)))


def _ports(probe: Probe) -> Iterable[_Port]:
    for device in probe.names(_RDMA):
        place = f"{_RDMA}/{device}"
        node = probe.text(f"{place}/device/numa_node").strip()
        for port in probe.names(f"{place}/ports"):
            yield _Port(
                device=without_addresses(device),
                state=port_state(probe.text(f"{place}/ports/{port}/state")),
                bits_per_second=port_bits_per_second(probe.text(f"{place}/ports/{port}/rate")),
                link_layer=probe.text(f"{place}/ports/{port}/link_layer").strip()[:16],
                numa_node=int(number(node)) if node and not node.startswith("-") else -1,
            )
