"""Values with methods for people, which take the place of the plain values everywhere.

They have no fields of their own, are equal to plain values of equal fields, and are shown in short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeAlias

from hetplan.cluster import spec
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.load import load_cluster as load_plain_cluster
from hetplan.drafting.draft import drafted_cluster
from hetplan.drafting.model import meant_model
from hetplan.errors import Fault, InputError, printable
from hetplan.files.settings import given_path
from hetplan.model.load import load_model as load_plain_model
from hetplan.model.spec import ModelSpec
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
    """Islands of devices and the links between them.

    From a file by `load_cluster`, or in words by `Cluster.from_nodes`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, plain: spec.Cluster) -> Self:
        """The plain value with these methods."""
        return cls(**fields_of(plain))

    @classmethod
    def from_nodes(cls, *nodes: str, between: str | Sequence[str] = ()) -> Self:
        """A cluster in words: `from_nodes("4x8 h100 @A", between="A B 10Gbit 30ms")`.

        nodes: how many of how many devices, device kind or node template, region. between: two
        regions or islands, a bandwidth that all who send share (with "each" after it: every
        device's own), a round trip. What is not said is as `hetplan init` writes it into a file.
        InputError names the words that are wrong.
        """
        links = (between,) if isinstance(between, str) else tuple(between)
        for argument, given in (("nodes", nodes), ("between", links)):
            wrong = next((each for each in given if not isinstance(each, str)), None)
            if wrong is not None:
                message = f"found a value of {type(wrong).__name__}; give words, as in '4x8 h100'"
                raise InputError(Fault(field=argument, message=message))
        with _arguments():
            return cls.of(load_plain_cluster(drafted_cluster(nodes, links).document))

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


def load_model(path: File) -> ModelSpec:
    """The model of a file, of a Hugging Face config.json, or of a name as in llama-3-70b.

    Names are those of shipped models, as people and hubs write them; nothing in a file is executed.
    InputError lists everything that is wrong, with file, line and field.
    """
    return load_plain_model(meant_path(path))


def meant_path(path: File) -> Path:
    """The file, or the shipped one of this name."""
    with _arguments():
        return meant_model(str(given_path(path, "path", ", or a model's name"))).path


@contextmanager
def _arguments() -> Iterator[None]:
    """Faults of options name the arguments that stand for them here."""
    try:
        yield
    except InputError as error:
        raise InputError(
            *(
                replace(
                    each,
                    field=each.field.removeprefix("--"),
                    message=each.message.removeprefix("--"),
                )
                for each in error.faults
            )
        ) from None


def load_cluster(path: File, catalogue: Sequence[DeviceKind] | None = None) -> Cluster:
    """The cluster that a cluster file (YAML, docs/clusters.md) describes.

    catalogue: device kinds that its islands may name, instead of the shipped ones. InputError lists
    everything that is wrong, with file, line and field.
    """
    return Cluster.of(load_plain_cluster(given_path(path, "path"), catalogue))
