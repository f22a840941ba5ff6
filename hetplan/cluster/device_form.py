"""How a device kind is written, in the catalogue and in a cluster file's own `devices`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.cluster.devices import FIGURES, MAX_LANES, PCIE_GENERATIONS
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import Bandwidth, Memory, Name, Rate, Ratio, Watts
from hetplan.files.reading import Document
from hetplan.units import Dimension, parse_quantity, pattern

DEVICES_SCHEMA = "hetplan.devices/3"

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]


def _operations(text: object) -> float:
    """`1979 TOP/s` -> operations per second; integers count as operations, not as FLOP."""
    as_rate = re.sub(r"(?<![L])OP/s\s*$", "FLOP/s", text) if isinstance(text, str) else text
    try:
        return parse_quantity(as_rate, Dimension.RATE)
    except InputError as error:
        message = str(error).replace("FLOP/s", "OP/s")
        raise PydanticCustomError("quantity", "{message}", {"message": message}) from error


Operations: TypeAlias = Annotated[
    float,
    BeforeValidator(_operations),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": pattern(Dimension.RATE).replace("FLOP/s", "OP/s"),
            "examples": ["1979 TOP/s"],
        }
    ),
]
"""`1979 TOP/s` -> operations per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakForm:
    """Dense matrix rates, without sparsity; a format that the device lacks is left out."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    bfloat16: Rate | None = None
    """bfloat16 with float32 accumulation."""
    float16: Rate | None = None
    """float16 with float32 accumulation; of cards with two rates, not the one that accumulates in
    float16."""
    float32: Rate | None = None
    """True float32, not TF32: what float32 training reaches with its default settings."""
    tf32: Rate | None = None
    """TF32, or the vendor's own 19-bit-like format for float32 tensors."""
    float8: Rate | None = None
    """float8 with float32 accumulation."""
    float4: Rate | None = None
    """4-bit floats with a scale per block, float32 accumulation; not the sparse rate."""
    int8: Operations | None = None
    """8-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpForm:
    """The vendor's own links between devices."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Text
    """As the vendor calls it, with its generation: NVLink 4, Infinity Fabric, HCCS."""
    bandwidth: Bandwidth
    """Of one device in one direction, all links together: half of a bidirectional figure."""
    one_peer: Bandwidth | None = None
    """What one pair of devices can use of it, in one direction; left out: all of it."""
    peers: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Other devices that it reaches in the vendor's usual node or pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostForm:
    """How the device is joined to its node."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    pcie: Annotated[int, Field(ge=PCIE_GENERATIONS[0], le=PCIE_GENERATIONS[-1])]
    """Generation of PCI Express."""
    lanes: Annotated[int, Field(ge=1, le=MAX_LANES)]
    """Lanes of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForm:
    """One kind of device."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    kind: Name
    """Name that islands use."""
    vendor: Name
    """Vendor; devices of one vendor share a communication library."""
    peak: PeakForm = PeakForm()
    """Dense matrix rates; none: times of this kind come from measurements only."""
    memory: Memory | None = None
    """Memory of one device; left out: every island of this kind says its own."""
    memory_bandwidth: Bandwidth | None = None
    """Of the device's own memory; left out: times of this kind come from measurements only."""
    scale_up: ScaleUpForm | None = None
    """The vendor's own links between devices; left out: none, or not public."""
    host: HostForm | None = None
    """How the device is joined to its node."""
    max_power: Watts | None = None
    """The board's or module's limit."""
    overlap_compute_slowdown: Ratio | None = None
    """How many times as long compute takes while the device communicates beside it; left out:
    unknown."""
    overlap_communication_slowdown: Ratio | None = None
    """How many times as long communication takes beside compute; left out: unknown."""
    fused_attention: Text | None = None
    """Library of fused attention with its backward pass; `none` where there is none; left out:
    unknown."""
    collectives: Name | None = None
    """The vendor's library of collectives: nccl, rccl, hccl, cncl, mccl, ..."""
    torch_device: Name | None = None
    """torch's device type: cuda, npu, mlu, musa, xpu, hpu, gcu, ..."""
    driver_names: list[Text] = field(default_factory=list)
    """What the driver or torch calls it, so that it is recognised on a machine."""
    provenance: Literal["datasheet", "measured"]
    """Whether the figures were printed by the vendor or measured."""
    source: Text
    """Where the figures were read that `sources` does not name."""
    sources: dict[str, Text] = field(default_factory=dict)
    """Where single figures were read: `memory: ...`, `peak.float8: ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesForm:
    """A file of the device catalogue."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    devices: list[DeviceForm]
    """Device kinds."""


def check_sources(document: Document) -> Iterator[Fault]:
    """Every source belongs to a figure that its kind gives."""
    for at in document.entries(("devices",)):
        path: Path = ("devices", at)
        sources = document.at(*path, "sources")
        for figure in sources if isinstance(sources, dict) else ():
            place = (*path, "sources", figure)
            if figure not in FIGURES:
                known = ", ".join(FIGURES)
                yield document.fault(place, f"{figure[:60]!a} is no figure; known: {known}")
            elif document.at(*path, *figure.split(".")) is None:
                yield document.fault(place, f"{figure} has a source and no value; give the figure")
