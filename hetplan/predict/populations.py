"""Which measurements a fit uses where the same thing was measured under different circumstances.

A population is everything measured under the same circumstances (device, driver, library, threads,
pace, measuring tool); its times do not mix with another's. For each (device kind, precision), class
of operators and operation of a link the newest population that has samples of it is used, and the
report names what was passed over. So all_reduce may come from nccl-tests, send_recv from hetplan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hetplan.errors import InputError
from hetplan.profiling.samples import (
    SENDS,
    LayerSample,
    LinkOperation,
    LinkSample,
    OperatorSample,
    ProfileSet,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Samples that may be fitted together, and how they were chosen."""

    layers: tuple[LayerSample, ...]
    links: tuple[LinkSample, ...]
    operators: tuple[OperatorSample, ...]
    populations: tuple[str, ...]
    """Those used, in words."""
    notes: tuple[str, ...]
    """Those passed over, in words."""


def choose(populations: Sequence[ProfileSet]) -> Chosen:
    """The newest population per device kind and precision, class of operators, and operation of a
    link.

    Of populations of one day the first one, in the order of the folders.
    """
    owners: dict[_What, list[int]] = {}
    for index, population in enumerate(populations):
        _check_traceable(population)
        names = dict.fromkeys(map(_layers_of, population.layers))
        names |= dict.fromkeys(map(_operation_of, population.links))
        names |= dict.fromkeys(map(_operators_of, population.operators))
        for name in names:
            owners.setdefault(name, []).append(index)
    winners = {
        # max returns the first of equals: folders named first win.
        name: max(found, key=lambda index: _newest(populations[index]))
        for name, found in owners.items()
    }
    passed_over: dict[tuple[_What, int, int], list[str]] = {}
    for name, found in sorted(owners.items()):
        for index in found:
            if index != winners[name]:
                # What lost to the same population stands in one note per link or device.
                key = (name[:2], index, winners[name])
                passed_over.setdefault(key, []).extend(name[2:])
    notes = tuple(
        _passed_over((*name, ", ".join(operations)), populations[loser], populations[winner])
        for (name, loser, winner), operations in passed_over.items()
    )
    return Chosen(
        layers=_won([each.layers for each in populations], _layers_of, winners),
        links=_won([each.links for each in populations], _operation_of, winners),
        operators=_won([each.operators for each in populations], _operators_of, winners),
        populations=tuple(_words(populations[index]) for index in sorted(set(winners.values()))),
        notes=notes,
    )


_What: TypeAlias = tuple[str, ...]
"""What one population is chosen for, in words."""
_Sample = TypeVar("_Sample", LayerSample, LinkSample, OperatorSample)


def _won(
    populations: Sequence[Sequence[_Sample]],
    what_of: Callable[[_Sample], _What],
    winners: Mapping[_What, int],
) -> tuple[_Sample, ...]:
    """Samples of each population that is the winner of what they are of."""
    return tuple(
        sample
        for index, samples in enumerate(populations)
        for sample in samples
        if winners[what_of(sample)] == index
    )


def _layers_of(sample: LayerSample) -> _What:
    return sample.device, sample.precision, "layers"


def _operators_of(sample: OperatorSample) -> _What:
    """Products of one tool and passes over memory of another may go together."""
    return sample.device, sample.precision, sample.operator.replace("_", " ")


def _operation_of(sample: LinkSample) -> _What:
    # The difference of the two sends is the rendezvous, so they come from one population.
    operation = LinkOperation.SEND_RECV if sample.operation in SENDS else sample.operation
    return "link", sample.link, str(operation)


def _passed_over(name: _What, loser: ProfileSet, winner: ProfileSet) -> str:
    why = "newer" if _newest(winner) > _newest(loser) else "as new, and read first"
    what = " ".join(word for word in name if word)
    return f"{what}: not used: {_words(loser)}; {why}: {_words(winner)}"


def _check_traceable(population: ProfileSet) -> None:
    """Refuses a set in which one thing was measured under several circumstances, untraceably."""
    circumstances: dict[str, set[tuple[object, ...]]] = {}
    for each in population.provenance:
        circumstances.setdefault(each.device, set()).add(each.circumstances)
    every = {words for several in circumstances.values() for words in several}
    doubtful = {device for device, several in circumstances.items() if len(several) > 1}
    repeated = _repeated([(sample.device, sample.shape) for sample in population.layers], doubtful)
    if repeated is None:
        shapes = [(sample.device, sample.shape) for sample in population.operators]
        repeated = _repeated(shapes, doubtful)
    if repeated is None and len(every) > 1:
        links = {sample.link for sample in population.links}
        repeated = _repeated([(each.link, _message(each)) for each in population.links], links)
    if repeated is not None:
        raise InputError(
            f"samples of {repeated} come from several populations and no longer say from which; "
            "fit them population by population: fit_populations(read_populations(folder)), or "
            "`hetplan fit --store`"
        )


def _repeated(
    named: Sequence[tuple[str, tuple[object, ...]]], doubtful: Collection[str]
) -> str | None:
    """The first of the doubtful names that has one shape twice."""
    seen: set[tuple[str, tuple[object, ...]]] = set()
    for entry in named:
        if entry[0] in doubtful and entry in seen:
            return entry[0]
        seen.add(entry)
    return None


def _message(sample: LinkSample) -> tuple[object, ...]:
    return sample.operation, sample.backend, sample.group_size, sample.message_bytes


def _newest(population: ProfileSet) -> str:
    """Latest ISO date on which one of its rows was measured; dates sort as text."""
    dates = {sample.measured_on for sample in population.layers}
    dates |= {sample.measured_on for sample in population.links}
    dates |= {sample.measured_on for sample in population.operators}
    dates |= {each.measured_on for each in population.provenance}
    return max(dates, default="")


def _words(population: ProfileSet) -> str:
    """Where and when the population was measured, in one line."""
    parts = []
    for each in population.provenance:
        threads = f"{each.threads} thread{'s' if each.threads != 1 else ''}"
        words = (
            f"{each.device} ({each.device_name})",
            each.measured_on,
            f"torch {each.torch_version}" if each.torch_version else each.tool,
            each.driver,
            threads if each.threads else "",
            f"paced {each.paced}" if each.paced else "",
        )
        parts.append(", ".join(word for word in words if word))
    rows = len(population.layers) + len(population.links) + len(population.operators)
    return f"{rows} row{'s' if rows != 1 else ''}: {' and '.join(parts) or 'without provenance'}"
