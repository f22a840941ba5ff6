"""How far are the laws of layers and links off, on sizes and devices that they did not see?

Of the fitted folder's own unit data, one thing is left out at a time, whole, and predicted by a fit
of the rest:

    size      every sample of one hidden size of one device; the device's other sizes are fitted
    device    every sample of one device; only other devices are fitted
    message   every message of every fourth octave of size of a link; its other octaves are fitted
    ranks     every message among one number of ranks of a link; its other numbers are fitted

Of another folder's unit data nothing is fitted and everything is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from evaluation.accuracy.devices import device_kind_of
from evaluation.accuracy.predict_unit import OperatorAnswers, judged_layer, judged_link
from evaluation.accuracy.scores import Errors, Judged, errors_of
from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.profiling.samples import (
    SENDS,
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
)

MAX_MESSAGES = 64
"""Of one operation among one number of ranks, evenly over the sizes: tables have a thousand."""
_OCTAVES_APART = 4
"""Every fourth octave is left out at once: four fits a link instead of one an octave (some twenty),
and the octaves beside each that is left out are still fitted."""
OCTAVES = "every fourth octave of message sizes, in turn"
ALL_OPERATORS = "operators"
COLLECTIVES = "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitErrors:
    """Figures of unit measurements that a fit did not see."""

    what: str
    """Kind of layer, class of operators, `operators` for all classes, or `collectives`."""
    device: str
    """Device kind, or link."""
    precision: str
    """Empty of links."""
    left_out: str
    """What the fit did not see."""
    errors: Errors


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitJudgement:
    """All of them, and what could not be judged."""

    rows: tuple[UnitErrors, ...]
    notes: tuple[str, ...]


def left_out(populations: Sequence[ProfileSet], whole: FittedPredictor) -> UnitJudgement:
    """Sizes, devices, messages and numbers of ranks left out in turn; `whole`: fitted on all."""
    return _together((*_sizes(populations), *_devices(populations, whole), *_messages(populations)))


def other_folder(populations: Sequence[ProfileSet], predictor: FittedPredictor) -> UnitJudgement:
    """Everything of a folder that was not fitted."""
    layers = [sample for each in populations for sample in each.layers]
    operators = [sample for each in populations for sample in each.operators]
    links = [sample for each in populations for sample in each.links]
    what = "not fitted"
    return _together(
        (
            *_layer_rows(layers, predictor, what),
            *_operator_rows(operators, predictor, what),
            *_link_rows(links, lambda _: predictor, what),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotJudged:
    """A sample that no prediction could be asked of, and why."""

    note: str


_Row: TypeAlias = UnitErrors | _NotJudged
"""Rows and what is missing from them come in one stream, in the order of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    what: str
    """Kind of layer, or class of operators."""
    judged: Judged


def _together(found: Iterable[_Row]) -> UnitJudgement:
    every = tuple(found)
    notes = dict.fromkeys(each.note for each in every if isinstance(each, _NotJudged))
    rows = tuple(each for each in every if isinstance(each, UnitErrors))
    return UnitJudgement(rows=rows, notes=tuple(notes))


def _sizes(populations: Sequence[ProfileSet]) -> Iterator[_Row]:
    layers = [sample for each in populations for sample in each.layers]
    for device, precision in _keys(layers):
        mine = [each for each in layers if (each.device, each.precision) == (device, precision)]
        sizes = sorted({each.hidden_size for each in mine})
        if len(sizes) < 2:
            continue
        judged: list[_Judged | _NotJudged] = []
        for size in sizes:
            predictor = fit_populations(_without_size(populations, device, size))
            unseen = [each for each in mine if each.hidden_size == size]
            judged += _judged_layers(unseen, predictor)
        what = f"each of hidden {', '.join(map(str, sizes))}"
        yield from _by_kind(device, precision, what, judged)


def _devices(populations: Sequence[ProfileSet], whole: FittedPredictor) -> Iterator[_Row]:
    devices = [sample.device for each in populations for sample in each.layers]
    devices += [sample.device for each in populations for sample in each.operators]
    for device in dict.fromkeys(devices):
        predictor = _without_device(whole, device)
        layers = [s for each in populations for s in each.layers if s.device == device]
        operators = [s for each in populations for s in each.operators if s.device == device]
        what = "the device"
        yield from _layer_rows(layers, predictor, what)
        yield from _operator_rows(operators, predictor, what)


def _without_device(whole: FittedPredictor, device: str) -> FittedPredictor:
    """The same without this device's laws: a device's laws come from its own samples alone."""
    laws = whole.laws
    return FittedPredictor(
        replace(
            laws,
            layers=tuple(law for law in laws.layers if law.device != device),
            operators=tuple(law for law in laws.operators if law.device != device),
        )
    )


def _without_size(
    populations: Sequence[ProfileSet], device: str, size: int
) -> tuple[ProfileSet, ...]:
    """The device's layers and operators of other hidden sizes, without links.

    Operators of the size are those that are as wide: products, norms, additions, look-ups.
    """
    kept = (
        replace(
            each,
            layers=tuple(s for s in each.layers if s.device == device and s.hidden_size != size),
            operators=tuple(
                s for s in each.operators if s.device == device and size not in (s.n, s.k)
            ),
            links=(),
        )
        for each in populations
    )
    return tuple(each for each in kept if each.layers or each.operators)


def _keys(
    samples: Sequence[LayerSample] | Sequence[OperatorSample],
) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((each.device, each.precision) for each in samples))


def _layer_rows(
    samples: Sequence[LayerSample], predictor: FittedPredictor, what: str
) -> Iterator[_Row]:
    for device, precision in _keys(samples):
        mine = [each for each in samples if (each.device, each.precision) == (device, precision)]
        yield from _by_kind(device, precision, what, _judged_layers(mine, predictor))


def _by_kind(
    device: str, precision: str, left: str, found: Sequence[_Judged | _NotJudged]
) -> Iterator[_Row]:
    """Embedding, transformer layers and head apart: they have laws of their own."""
    yield from (each for each in found if isinstance(each, _NotJudged))
    known = [each for each in found if isinstance(each, _Judged)]
    for layer in dict.fromkeys(each.what for each in known):
        same = [each.judged for each in known if each.what == layer]
        yield from _row(f"{layer} layers", device, precision, left, same)


def _judged_layers(
    samples: Sequence[LayerSample], predictor: FittedPredictor
) -> list[_Judged | _NotJudged]:
    kinds = load_catalogue()
    judged: list[_Judged | _NotJudged] = []
    for sample in samples:
        try:
            found = judged_layer(sample, device_kind_of(sample.device, kinds), predictor)
        except InputError as fault:
            judged.append(_NotJudged(note=f"a layer of {sample.device} is not judged: {fault}"))
            continue
        if found is not None:
            judged.append(_Judged(what=sample.layer, judged=found))
    return judged


def _operator_rows(
    samples: Sequence[OperatorSample], predictor: FittedPredictor, left: str
) -> Iterator[_Row]:
    answers = OperatorAnswers(predictor)
    for device, precision in _keys(samples):
        mine = [each for each in samples if (each.device, each.precision) == (device, precision)]
        found = _judged_operators(mine, answers)
        yield from (each for each in found if isinstance(each, _NotJudged))
        known = [each for each in found if isinstance(each, _Judged)]
        yield from _row(ALL_OPERATORS, device, precision, left, [each.judged for each in known])
        for operator in dict.fromkeys(each.what for each in known):
            same = [each.judged for each in known if each.what == operator]
            yield from _row(operator, device, precision, left, same)


def _judged_operators(
    samples: Sequence[OperatorSample], answers: OperatorAnswers
) -> list[_Judged | _NotJudged]:
    kinds = load_catalogue()
    judged: list[_Judged | _NotJudged] = []
    for sample in samples:
        try:
            found = answers.judged(sample, device_kind_of(sample.device, kinds))
        except InputError as fault:
            note = f"a {sample.operator} of {sample.device} is not judged: {fault}"
            judged.append(_NotJudged(note=note))
            continue
        if found is not None:
            judged.append(_Judged(what=sample.operator, judged=found))
    return judged


def _messages(populations: Sequence[ProfileSet]) -> Iterator[UnitErrors]:
    for link in dict.fromkeys(each.link for one in populations for each in one.links):
        yield from _one_link(link, populations)


def _one_link(link: str, populations: Sequence[ProfileSet]) -> Iterator[UnitErrors]:
    mine = [each for one in populations for each in one.links if each.link == link]
    folds = sorted({_fold(each) for each in mine})
    octaves = {fold: _without(populations, link, _fold, fold) for fold in folds}
    yield from _link_rows(mine, lambda s: octaves[_fold(s)], OCTAVES)
    # A send is always between two: it stays when collectives among two are left out.
    groups = [each for each in mine if _ranks(each)]
    ranks = sorted({_ranks(each) for each in groups})
    if len(ranks) > 1:
        fits = {count: _without(populations, link, _ranks, count) for count in ranks}
        what = f"each of {', '.join(map(str, ranks))} ranks"
        yield from _link_rows(groups, lambda s: fits[_ranks(s)], what)


def _without(
    populations: Sequence[ProfileSet],
    link: str,
    group_of: Callable[[LinkSample], int],
    group: int,
) -> FittedPredictor:
    """Fitted on the samples of one link that are not of this group."""
    kept = (
        replace(
            each,
            layers=(),
            operators=(),
            links=tuple(s for s in each.links if s.link == link and group_of(s) != group),
        )
        for each in populations
    )
    return fit_populations(tuple(each for each in kept if each.links))


def _ranks(sample: LinkSample) -> int:
    """Of a collective; 0 of sends."""
    return 0 if sample.operation in SENDS else sample.group_size


def _fold(sample: LinkSample) -> int:
    return int(math.log2(sample.message_bytes)) % _OCTAVES_APART


def _link_rows(
    samples: Sequence[LinkSample],
    predictor_of: Callable[[LinkSample], FittedPredictor],
    what: str,
) -> Iterator[UnitErrors]:
    for link in dict.fromkeys(each.link for each in samples):
        judged = []
        for sample in _thinned([each for each in samples if each.link == link]):
            found = judged_link(sample, predictor_of(sample))
            if found is not None:
                judged.append(found)
        yield from _row(COLLECTIVES, link, "", what, judged)


def _thinned(samples: Sequence[LinkSample]) -> Iterator[LinkSample]:
    """At most `MAX_MESSAGES` of each operation and number of ranks, evenly by size."""
    groups: dict[tuple[str, int, int], list[LinkSample]] = {}
    for each in samples:
        groups.setdefault((each.operation, each.group_size, each.nodes), []).append(each)
    for group in groups.values():
        group.sort(key=lambda each: each.message_bytes)
        step = max(1.0, len(group) / MAX_MESSAGES)
        yield from (group[int(at * step)] for at in range(int(len(group) / step)))


def _row(
    what: str, device: str, precision: str, left: str, judged: Sequence[Judged]
) -> Iterator[UnitErrors]:
    errors = errors_of(judged)
    if errors is not None:
        yield UnitErrors(
            what=what, device=device, precision=precision, left_out=left, errors=errors
        )
