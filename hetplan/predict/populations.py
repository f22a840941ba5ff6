"""Which measurements a fit uses where the same thing was measured under different circumstances.

A population is everything measured under the same circumstances (device, driver, library, threads,
pace, measuring tool); its times do not mix with another's. For each (device kind, precision), class
of operators and operation of a link the newest population that has samples of it is used, and the
report names what was passed over. So all_reduce may come from nccl-tests, send_recv from hetplan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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


_Subject: TypeAlias = tuple[str, ...]
"""What one population is chosen for, in words."""
_Sample: TypeAlias = LayerSample | LinkSample | OperatorSample
_OneKind = TypeVar("_OneKind", LayerSample, LinkSample, OperatorSample)


def choose(populations: Sequence[ProfileSet]) -> Chosen:
    """The newest population per device kind and precision, class of operators, and operation of a
    link.

    Of populations of one day the first one, in the order of the folders.
    """
    owners: dict[_Subject, list[int]] = {}
    for index, population in enumerate(populations):
        _check_traceable(population)
        for subject in dict.fromkeys(map(_subject, _samples(population))):
            owners.setdefault(subject, []).append(index)
    winners = {
        # max returns the first of equals: folders named first win.
        subject: max(indices, key=lambda index: _newest(populations[index]))
        for subject, indices in owners.items()
    }
    passed_over: dict[tuple[_Subject, int, int], list[str]] = {}
    for subject, indices in sorted(owners.items()):
        for index in indices:
            if index != winners[subject]:
                # What lost to the same population stands in one note per link or device.
                key = (subject[:2], index, winners[subject])
                passed_over.setdefault(key, []).extend(subject[2:])

    def won(samples: Iterable[tuple[_OneKind, ...]]) -> tuple[_OneKind, ...]:
        return tuple(
            sample
            for index, of_population in enumerate(samples)
            for sample in of_population
            if winners[_subject(sample)] == index
        )

    return Chosen(
        layers=won(each.layers for each in populations),
        links=won(each.links for each in populations),
        operators=won(each.operators for each in populations),
        populations=tuple(_words(populations[index]) for index in sorted(set(winners.values()))),
        notes=tuple(
            _passed_over((*place, ", ".join(what)), populations[loser], populations[winner])
            for (place, loser, winner), what in passed_over.items()
        ),
    )


def _samples(population: ProfileSet) -> Iterable[_Sample]:
    return chain(population.layers, population.links, population.operators)


def _subject(sample: _Sample) -> _Subject:
    if isinstance(sample, LayerSample):
        return sample.device, sample.precision, "layers"
    if isinstance(sample, OperatorSample):
        # Products of one tool and passes over memory of another may go together.
        return sample.device, sample.precision, sample.operator.replace("_", " ")
    # The difference of the two sends is the rendezvous, so they come from one population.
    operation = LinkOperation.SEND_RECV if sample.operation in SENDS else sample.operation
    return "link", sample.link, str(operation)


def _passed_over(subject: _Subject, loser: ProfileSet, winner: ProfileSet) -> str:
    why = "newer" if _newest(winner) > _newest(loser) else "as new, and read first"
    what = " ".join(word for word in subject if word)
    return f"{what}: not used: {_words(loser)}; {why}: {_words(winner)}"


def _check_traceable(population: ProfileSet) -> None:
    """Refuses a set in which one shape was measured under several circumstances, untraceably."""
    circumstances: dict[str, set[tuple[object, ...]]] = {}
    for origin in population.provenance:
        circumstances.setdefault(origin.device, set()).add(origin.circumstances)
    doubtful = {device for device, several in circumstances.items() if len(several) > 1}
    links: set[str] = set()
    if len(set().union(*circumstances.values())) > 1:
        links = {sample.link for sample in population.links}
    messages = (
        (each.link, (each.operation, each.backend, each.group_size, each.message_bytes))
        for each in population.links
    )
    repeated = (
        _repeated(((sample.device, sample.shape) for sample in population.layers), doubtful)
        or _repeated(((sample.device, sample.shape) for sample in population.operators), doubtful)
        or _repeated(messages, links)
    )
    if repeated is not None:
        raise InputError(
            f"samples of {repeated} come from several populations and no longer say from which; "
            "fit them population by population: fit_populations(read_populations(folder)), or "
            "`hetplan fit --store`"
        )


def _repeated(
    named: Iterable[tuple[str, tuple[object, ...]]], doubtful: Collection[str]
) -> str | None:
    """The first of the doubtful names that has one shape twice."""
    seen: set[tuple[str, tuple[object, ...]]] = set()
    for entry in named:
        if entry[0] in doubtful and entry in seen:
            return entry[0]
        seen.add(entry)
    return None


def _newest(population: ProfileSet) -> str:
    """Latest ISO date on which one of its rows was measured; dates sort as text."""
    dated = chain(_samples(population), population.provenance)
    return max((each.measured_on for each in dated), default="")


def _words(population: ProfileSet) -> str:
    """Where and when the population was measured, in one line."""
    parts = []
    for origin in population.provenance:
        threads = f"{origin.threads} thread{'s' if origin.threads != 1 else ''}"
        words = (
            f"{origin.device} ({origin.device_name})",
            origin.measured_on,
            f"torch {origin.torch_version}" if origin.torch_version else origin.tool,
            origin.driver,
            threads if origin.threads else "",
            f"paced {origin.paced}" if origin.paced else "",
        )
        parts.append(", ".join(word for word in words if word))
    rows = sum(1 for _ in _samples(population))
    return f"{rows} row{'s' if rows != 1 else ''}: {' and '.join(parts) or 'without provenance'}"
