"""How a sweep file is written: every list is an axis, the grid is their product.

Files are named relative to the sweep file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from hetplan.files.quantities import Bandwidth, Count, FileForm, Name, Seconds
from hetplan.job.load import TargetName

SWEEP_SCHEMA = "hetplan.sweep/1"

Backend: TypeAlias = Literal["processes", "dask", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAxis(FileForm):
    """A link between two islands or two regions whose speed varies."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Two islands, or two regions: all links between their islands."""
    bandwidth: list[Bandwidth] = field(default_factory=list)
    """What all devices that send over it share; each instead of the cluster file's figure."""
    round_trip: list[Seconds] = field(default_factory=list)
    """There and back; each instead of the cluster file's figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAxis(FileForm):
    """An island whose number of nodes varies."""

    island: Name
    """Its name in the cluster files."""
    nodes: Annotated[list[Count], Field(min_length=1)]
    """Numbers of nodes, each instead of the cluster file's; nodes lose their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepForm(FileForm):
    """A sweep file."""

    models: Annotated[list[str], Field(min_length=1)]
    """Model files."""
    clusters: Annotated[list[str], Field(min_length=1)]
    """Cluster files."""
    jobs: Annotated[list[str], Field(min_length=1)]
    """Job files."""
    targets: list[TargetName] = field(default_factory=list)
    """Instead of the jobs' targets."""
    global_batch_size: list[Count] = field(default_factory=list)
    """Instead of the jobs' batches."""
    sequence_length: list[Count] = field(default_factory=list)
    """Instead of the jobs' lengths."""
    links: list[LinkAxis] = field(default_factory=list)
    """Links whose speed varies."""
    nodes: list[NodesAxis] = field(default_factory=list)
    """Islands whose size varies."""
    backend: Backend = "processes"
    """Where plans are made. Processes of this machine, or a cluster of Dask's or Ray's that the
    environment names."""
    workers: Count | None = None
    """Plans made at the same time; left out: one per core."""
