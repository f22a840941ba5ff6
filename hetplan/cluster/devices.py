"""The figures of a device kind, their sources, and what a power cap leaves of a device's clock.

A figure that the documents of a kind do not say is 0 or an empty text, meaning unknown: nothing is
guessed. The law of a capped clock (`capped_clock_ratio`) is

    P / P_max = s + (1 - s) f max(f, v)^2

with the clock f over the one at the board's limit, a static part s that does not fall with it, and
a voltage that is in proportion to the clock down to its least, v: dynamic power is f V^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.errors import InputError

CPU_KIND = "cpu"
"""Device kind of one CPU core of the machine at hand; it has no accelerator library."""

DTYPES = ("bfloat16", "float16", "float32", "tf32", "float8", "float4", "int8")
"""Number formats whose rates are kept, in the order in which a kind lists them."""

FIGURES = (
    *(f"peak.{dtype}" for dtype in DTYPES),
    "memory",
    "memory_bandwidth",
    "scale_up",
    "host",
    "max_power",
    "overlap_compute_slowdown",
    "overlap_communication_slowdown",
    "fused_attention",
    "collectives",
    "torch_device",
)
"""Names of the figures that a kind may have and that `sources` may name."""

ESTIMATED = "estimated:"
"""How the source of a figure begins that no document says."""

# Bytes per second and direction of one lane after line coding: 2.5 and 5 GT/s with 8b/10b, 8, 16
# and 32 GT/s with 128b/130b, 64 GT/s with 242 of 256 bytes per flit (PCI Express Base 6.0).
_PCIE_LANE_BYTES_PER_SECOND = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}

PCIE_GENERATIONS = tuple(_PCIE_LANE_BYTES_PER_SECOND)
"""Generations of PCI Express whose rate is known."""
MAX_LANES = 32
"""Lanes of the widest link of PCI Express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpFabric:
    """The vendor's own links between devices, without the network of the node."""

    name: str
    bandwidth_bytes_per_second: float
    """Of one device in ONE direction, all its links together; documents often print both."""
    one_peer_bytes_per_second: float = 0.0
    """Of one pair of devices, in one direction; 0: all of it, as behind a switch,
    or not known."""
    peers: int = 0
    """Devices that it reaches in a usual node or pod; 0 where that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInterface:
    """How the device is joined to its node."""

    pcie_generation: int
    lanes: int

    def __post_init__(self) -> None:
        if self.pcie_generation not in _PCIE_LANE_BYTES_PER_SECOND:
            known = ", ".join(map(str, PCIE_GENERATIONS))
            raise InputError(f"pcie_generation is {self.pcie_generation}; known: {known}")
        if not 1 <= self.lanes <= MAX_LANES:
            raise InputError(f"lanes is {self.lanes}; it must be from 1 to {MAX_LANES}")

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """In one direction, after line coding and before packet headers."""
        return self.lanes * _PCIE_LANE_BYTES_PER_SECOND[self.pcie_generation]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSource:
    """Where one figure was read, when that is not where the others were."""

    figure: str
    """One of FIGURES."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of accelerator and where its figures come from."""

    kind: str
    """Catalogue name, such as `nvidia-a100-80gb-sxm`."""
    vendor: str
    peak_flops_per_second: tuple[tuple[str, float], ...]
    """(number format, dense rate without sparsity), one pair per format the device has."""
    memory_bytes: float
    memory_bandwidth_bytes_per_second: float
    """0 where it is not known; then times of this kind come from measurements only."""
    provenance: str
    """`datasheet` or `measured`."""
    source: str
    """Where the figures were read that `sources` does not name."""
    scale_up: ScaleUpFabric | None = None
    """None: the device has none, or its figure is not public."""
    host: HostInterface | None = None
    max_power_watts: float = 0.0
    """The board's or module's limit."""
    overlap_compute_slowdown: float = 0.0
    """How many times as long compute takes beside communication; 0: unknown."""
    overlap_communication_slowdown: float = 0.0
    """How many times as long communication takes beside compute; 0: unknown."""
    fused_attention: str = ""
    """Library of fused attention with its backward pass for this kind; `none`; empty: unknown."""
    collectives: str = ""
    """The vendor's library of collectives (nccl, rccl, hccl, ...)."""
    torch_device: str = ""
    """torch's device type (cuda, npu, mlu, musa, xpu, hpu, gcu, ...)."""
    driver_names: tuple[str, ...] = ()
    """What the driver or torch calls it."""
    sources: tuple[FigureSource, ...] = ()
    """Figures that were not read in `source`."""
    architecture: str = ""
    """What its kernels are built for (sm90, gfx942, ascend910b, ...); empty: not known."""

    def __post_init__(self) -> None:
        for name in ("overlap_compute_slowdown", "overlap_communication_slowdown"):
            factor = getattr(self, name)
            if factor != 0 and not 1 <= factor < math.inf:
                raise InputError(
                    f"{name} of {self.kind} is {factor}; it is how many times as long something "
                    "takes, at least 1, or 0 where it is not known"
                )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number formats for which a rate is known."""
        return tuple(name for name, _ in self.peak_flops_per_second)

    @property
    def estimated_note(self) -> str:
        """Which figures no document says, so that its `source` begins with ESTIMATED, and from what
        they are taken; empty: none.
        """
        found: dict[str, list[str]] = {}
        for each in self.sources:
            if each.source.startswith(ESTIMATED):
                found.setdefault(each.source.removeprefix(ESTIMATED), []).append(each.figure)
        why = "; ".join(f"{', '.join(figures)} ({text.strip()})" for text, figures in found.items())
        return (
            f"{self.kind}: no document says all of its figures, estimated are {why}" if why else ""
        )

    def peak(self, precision: str) -> float:
        """Dense rate in `precision`; an InputError where the device does not have it."""
        for name, rate in self.peak_flops_per_second:
            if name == precision:
                return rate
        have = ", ".join(self.dtypes) or "none"
        raise InputError(
            f"device kind {self.kind} has no {precision} rate, and what is asked was not measured "
            f"(rates it has: {have}); choose another precision, or measure the kind with "
            "`hetplan profile`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKinds:
    """A catalogue, as `hetplan doctor --kinds --json` prints it."""

    kinds: tuple[DeviceKind, ...]


STATIC_POWER = 0.1
"""Assumed: part of a board's limit that does not fall with the clock, about what idle boards draw.
McDonald et al. (arXiv 2205.09646) found language models trained under 150 of 250 W on average 6.8 %
slower; this law says 22 %, because it takes the work to draw all of the limit and to wait for the
clock only. Where a capped clock was read, `clock_ratio` without the cap is better."""
MIN_VOLTAGE = 0.6
"""Assumed: part of its voltage at the highest clock below which a chip's voltage does not go."""


def capped_clock_ratio(power_ratio: float) -> float:
    """Clock under a power cap over the clock at the limit of the board.

    A device that did not draw its limit anyway loses less: this is a lower bound of its clock. An
    InputError where the cap leaves nothing to compute with.
    """
    if power_ratio >= 1:
        return 1.0
    dynamic = (power_ratio - STATIC_POWER) / (1.0 - STATIC_POWER)
    if dynamic <= 0:
        raise InputError(
            f"a power cap of {power_ratio:.0%} of the board's limit is no more than the "
            f"{STATIC_POWER:.0%} that a device is taken to draw without computing; raise it"
        )
    scaled = float(dynamic ** (1.0 / 3.0))
    return scaled if scaled >= MIN_VOLTAGE else dynamic / MIN_VOLTAGE**2
