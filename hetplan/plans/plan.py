"""What runs where: the plan, as intent, free of any trainer's spelling.

Layers are positions in `ModelSpec.layers` (0 is the embedding, num_layers + 1 the head). Devices
are the cluster's device numbers, as ranges with strides, so that a plan for 100,000 devices stays
small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from hetplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """`count` device numbers from `start`, `stride` apart."""

    start: int
    count: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1 or self.stride < 1:
            raise InputError(
                f"start {self.start}, count {self.count}, stride {self.stride}; device numbers "
                "begin at 0, and count and stride at 1"
            )

    @property
    def last(self) -> int:
        """The largest device number."""
        return self.start + (self.count - 1) * self.stride

    def devices(self) -> range:
        """The device numbers in order."""
        return range(self.start, self.start + self.count * self.stride, self.stride)


def compress(devices: Sequence[int]) -> tuple[DeviceRange, ...]:
    """The fewest ranges, found greedily, that list these device numbers in this order."""
    ranges: list[DeviceRange] = []
    at = 0
    while at < len(devices):
        stop, stride = at + 1, 1
        if stop < len(devices):
            stride = devices[stop] - devices[at]
            while stop < len(devices) and devices[stop] - devices[stop - 1] == stride:
                stop += 1
        if stride < 1:
            stop, stride = at + 1, 1
        ranges.append(DeviceRange(start=devices[at], count=stop - at, stride=stride))
        at = stop
    return tuple(ranges)


def expand(ranges: Iterable[DeviceRange]) -> tuple[int, ...]:
    """Every device number of these ranges, in order."""
    return tuple(chain.from_iterable(part.devices() for part in ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Layers `start` up to but not including `stop`."""

    start: int
    stop: int


class RecomputeGranularity(StrEnum):
    """What a stage computes a second time in its backward pass instead of keeping it."""

    NONE = "none"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Recomputation of one stage."""

    granularity: RecomputeGranularity = RecomputeGranularity.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Devices of a stage that share degrees: dp * cp * tp of them, tp fastest, then cp, then dp."""

    devices: tuple[DeviceRange, ...]
    tp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    microbatch_size: int
    """Sequences of one microbatch on one data-parallel rank."""
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of all ranges."""
        return sum(part.count for part in self.devices)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.num_devices // (self.tp * self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers and the devices that run them."""

    chunks: tuple[LayerRange, ...]
    """One layer range per virtual stage."""
    replicas: tuple[Replica, ...]
    recompute: Recompute = Recompute()
    warmup_depth: int
    """Most microbatches in flight: forward done, backward not yet."""

    @property
    def num_layers(self) -> int:
        """Layers of all chunks, embedding and head counted."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Order of forward and backward passes."""

    name: str
    """`1f1b`."""
    virtual_stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses from stage `index` to the next one, and its gradient back."""

    index: int
    transport: str
    """A `hetplan.cluster.spec.Transport` value."""
    precision: str
    """Number format on the wire, a `hetplan.job.spec.Precision` value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A whole copy of the model over its own devices."""

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    """One per pair of neighbouring stages, in order."""
    num_microbatches: int
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionGroup:
    """Layers whose gradients are summed over the same devices."""

    layers: LayerRange
    members: tuple[DeviceRange, ...]
    """Devices in the order dp, tp; members with equal tp position reduce with each other."""
    degree: int
    """Ranks of one reduction."""
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What runs where."""

    pipelines: tuple[Pipeline, ...]
    reduction_groups: tuple[ReductionGroup, ...]
    """Empty where no gradient is reduced (dp = 1)."""
    precision: str
    optimizer: str
    optimizer_shards: int
    """Ranks over which the optimizer state of a parameter is split; 1 is no sharding."""
    padded_vocab_size: int
    """Vocabulary rounded up so that tp divides it."""
    tied_embedding_devices: tuple[DeviceRange, ...]
    """First- and last-stage devices that share a tied matrix; empty where not tied."""
    target: str
    unused_devices: tuple[DeviceRange, ...]
