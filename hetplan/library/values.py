"""Values with methods for people, which take the place of the plain values everywhere.

They have no fields of their own, are equal to plain values of equal fields, and are shown in short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeAlias

from hetplan.cluster import load, spec
from hetplan.cluster.devices import DeviceKind
from hetplan.reports.terminal import printable
from hetplan.units import format_bytes

File: TypeAlias = str | PathLike[str]

MOST_LINES = 20
"""Of a value that is shown without being asked for."""


def short(lines: Iterable[str], more: str = "") -> str:
    """The lines; of too many the first ones, and how many more there are."""
    found = [printable(line) for line in lines]
    if len(found) <= MOST_LINES:
        return "\n".join(found)
    left = len(found) - MOST_LINES + 1
    return "\n".join((*found[: MOST_LINES - 1], f"and {left} more lines{more}"))


def fields_of(value: Any) -> dict[str, Any]:
    """By name."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


class Cluster(spec.Cluster):
    """Everything that the job may use: islands of devices and the links between them.

    From a file by `load_cluster`, or in words by `Cluster.from_nodes`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, plain: spec.Cluster) -> Self:
        """The plain value with these methods."""
        return cls(**fields_of(plain))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, spec.Cluster) and fields_of(self) == fields_of(other)
        return same if isinstance(other, spec.Cluster) else NotImplemented

    __hash__ = spec.Cluster.__hash__

    def __repr__(self) -> str:
        islands = (
            f"  {each.name} in {each.region}: {each.nodes} x {each.devices_per_node} "
            f"{each.device.kind}, {format_bytes(each.memory_bytes)} each"
            for each in self.islands
        )
        return short((f"{self.name}: {self.num_devices:,} devices", *islands))


def load_cluster(path: File, catalogue: Sequence[DeviceKind] | None = None) -> Cluster:
    """The cluster that a cluster file (YAML, docs/clusters.md) describes.

    catalogue: device kinds that its islands may name, instead of the shipped ones. InputError lists
    everything that is wrong, with file, line and field.
    """
    return Cluster.of(load.load_cluster(Path(path), catalogue))
