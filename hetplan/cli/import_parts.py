"""Parts that the modules of `hetplan import --draft` share: option values, files, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.importers.open import guessed
from hetplan.importers.records import ImportContext, Imported, NodeTopology
from hetplan.units import Dimension, parse_quantity

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class Faults:
    """Faults of parts that do not depend on each other, so that all are reported at once."""

    found: list[Fault] = field(default_factory=list)

    def of(self, make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What `make` returns; None where it finds a fault, which is kept."""
        try:
            return make(*args, **kwargs)
        except InputError as error:
            self.found += error.faults
            return None

    def stop(self) -> None:
        """Raise what was found, each once."""
        if self.found:
            raise InputError(*dict.fromkeys(self.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandParts:
    """An island before its links."""

    name: str
    device: DeviceKind
    nodes: int
    devices_per_node: int
    hosts: tuple[str, ...]
    topology: NodeTopology | None


def quantity(option: str, text: str, dimension: Dimension) -> float:
    """The value of an option in base units; an InputError that names the option."""
    try:
        return parse_quantity(text, dimension)
    except InputError as error:
        raise InputError(Fault(field=f"--{option}", message=str(error))) from error


def split_by_island(
    option: str, values: Iterable[str], names: tuple[str, ...]
) -> dict[str, list[str]]:
    """Values per island; one without `ISLAND=` is of every island that has none of its own."""
    own: dict[str, list[str]] = {}
    common: list[str] = []
    for value in values:
        island, equals, rest = value.partition("=")
        if not equals:
            common.append(value)
        elif island in names:
            own.setdefault(island, []).append(rest)
        else:
            message = f"no island is called {island[:60]!a}; the islands are {', '.join(names)}"
            raise InputError(Fault(field=f"--{option}", message=message))
    return {name: own.get(name) or common for name in names if own.get(name) or common}


def one_each(option: str, values: Iterable[str], names: tuple[str, ...]) -> dict[str, str]:
    """As `split_by_island`, where an island can have one value; an InputError for two."""
    split = split_by_island(option, values, names)
    for name, found in split.items():
        if len(found) > 1:
            message = f"{name} has {len(found)} of them; give one"
            raise InputError(Fault(field=f"--{option}", message=message))
    return {name: found[0] for name, found in split.items()}


def guess(option: str, path: str, among: tuple[str, ...]) -> Imported:
    """What the file of an option says, read as the one of these kinds that it looks like."""
    try:
        return guessed(read_text(Path(path)), ImportContext(file=path), among)
    except InputError as error:
        raise InputError(
            *(replace(each, message=f"{each.message} (--{option})") for each in error.faults)
        ) from error
