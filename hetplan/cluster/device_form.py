"""How a device kind is written, in the catalogue and in a cluster file's own `devices`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from hetplan.files.quantities import Bandwidth, Memory, Name, Rate

DEVICES_SCHEMA = "hetplan.devices/1"

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakForm:
    """Dense matrix rates, without sparsity; a precision that the device lacks is left out."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    bfloat16: Rate | None = None
    """bfloat16 with float32 accumulation."""
    float16: Rate | None = None
    """float16 with float32 accumulation."""
    float32: Rate | None = None
    """True float32, not TF32: what float32 training reaches with its default settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForm:
    """One kind of device."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    kind: Name
    """Name that islands use."""
    vendor: Name
    """Maker; devices of one maker share a communication library."""
    peak: PeakForm = PeakForm()
    """Dense matrix rates; none: times of this kind come from measurements only."""
    memory: Memory | None = None
    """Memory of one device; left out: every island of this kind says its own."""
    memory_bandwidth: Bandwidth | None = None
    """Of the device's own memory; left out: times of this kind come from measurements only."""
    provenance: Literal["datasheet", "measured"]
    """Whether the figures were printed by the maker or measured."""
    source: Text
    """Where the figures were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesForm:
    """A file of the device catalogue."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    devices: list[DeviceForm]
    """Device kinds."""
