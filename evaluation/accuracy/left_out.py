"""A folder's unit data, and errors of the laws on sizes and devices that they did not see.

    unit/layer_times.csv       operators: Aceso's profiler on six devices (unit_operators)
    unit/gemm_efficiency.csv   operators: SimuMax's products and attention (unit_operators)
    unit/collectives.csv       links: collectives by size, ranks and nodes (unit_links)
    sailor/layer_profiles      whole layers, float32 (unit_layers)

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas

from evaluation.accuracy.clusters import CLARIDEN, device_kind_of
from evaluation.accuracy.scores import errors_of
from evaluation.accuracy.unit_data import Notes
from evaluation.accuracy.unit_layers import read_layers
from evaluation.accuracy.unit_links import (
    GALVATRON_NODE,
    VTRAIN_V100_NODE,
    node_link,
    read_collectives,
)
from evaluation.accuracy.unit_operators import read_operators, read_products
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.operators import WITH_WEIGHTS
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.predict.layer.laws import sample_query
from hetplan.predict.operator.values import sample_operator
from hetplan.predict.predictor import DATASHEET, MEASURED, Prediction
from hetplan.profiling.samples import (
    SENDS,
    LayerSample,
    LinkOperation,
    LinkSample,
    OperatorPhase,
    OperatorSample,
    Phase,
    ProfileSet,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitData:
    """Everything that a folder's unit data say of single operators, layers and links."""

    populations: tuple[ProfileSet, ...] = ()
    """Each with one provenance; of two of one device and precision the first is the better one."""
    notes: tuple[str, ...] = ()
    """Rows that are not used, counted by reason, and what a reader of the others must know."""


def read_unit(folder: Path) -> UnitData:
    """The populations of a reference folder; an InputError with file and line for wrong rows.

    `folder` holds `unit/` and `sailor/`; what of them is missing is noted.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name a folder of reference data")
    notes = Notes()
    collectives = read_collectives(folder, notes)
    links = [sample for population in collectives for sample in population.links]
    populations = (
        *read_operators(folder, notes),
        *read_products(folder, notes),
        *collectives,
        *read_layers(folder, notes, links),
    )
    return UnitData(populations=populations, notes=notes.lines())


Row = dict[str, Any]
"""A prediction beside a measurement, as `evaluation.accuracy.scores` takes them."""


def judged_layer(sample: LayerSample, device: DeviceKind, predictor: FittedPredictor) -> Row | None:
    """A layer's pass beside its prediction; None of passes that no prediction is of (updates)."""
    phase = sample.phase
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        return None
    _precision(sample.precision)  # an InputError that names an unknown one
    found = predictor.layer(device, sample_query(sample))
    name = (
        f"{sample.layer} {phase}, hidden {sample.hidden_size}, microbatch "
        f"{sample.microbatch_size}, tp {sample.tp}"
    )
    return _beside(name, found, sample.median_seconds)


def judged_link(sample: LinkSample, predictor: FittedPredictor) -> Row | None:
    """A message beside its prediction; None where only a datasheet could answer, which has none."""
    link = Link(
        # Says how many of a device's links a group uses; a prediction from it alone is none.
        bandwidth_bytes_per_second=fabric_bytes_per_second(sample.link),
        latency_seconds=0.0,
        transport=Transport.HOST_STAGED if sample.backend == "gloo" else Transport.DEVICE_DIRECT,
        samples=sample.link,
    )
    name = f"{sample.operation} of {sample.message_bytes} B among {sample.group_size}"
    if sample.operation in SENDS:
        law = predictor.send(link, sample.message_bytes)
        latency = (
            law.wire_latency_seconds
            if sample.operation == LinkOperation.SEND_RECV_LATE
            else law.rendezvous_latency_seconds
        )
        found = Prediction(
            seconds=latency + sample.message_bytes * law.seconds_per_byte,
            log_halfwidth=law.log_halfwidth,
            source=law.source,
        )
    else:
        found = predictor.collective(
            link,
            sample.operation,
            sample.group_size,
            sample.message_bytes,
            nodes=sample.nodes,
            groups=sample.groups,
        )
    if found.source == DATASHEET:
        return None
    return _beside(name, found, sample.median_seconds)


_KINDS = (
    (GALVATRON_NODE, "nvidia-a100-80gb-sxm"),
    (VTRAIN_V100_NODE, "nvidia-v100-16gb-sxm"),
)
"""Links that are called after a publication, and a kind with their fabric."""
_ALPS = node_link("nvidia-gh200-96gb")


@lru_cache(maxsize=64)
def fabric_bytes_per_second(link: str) -> float:
    """What one device's links inside a node have by their figures; 1 of links between nodes."""
    if link == _ALPS:  # links of nodes of four, which are no figure of the kind
        return CLARIDEN.inside_bytes_per_second
    names = dict(_KINDS)
    for kind in load_catalogue():
        if link == node_link(kind.kind) or names.get(link) == kind.kind:
            # A bridge between two devices does not join the other devices of a node.
            bridge = kind.scale_up is not None and kind.scale_up.peers == 1
            fabric = kind.host if bridge else kind.scale_up or kind.host
            if fabric is not None:
                return fabric.bandwidth_bytes_per_second
    return 1.0


def judged_operator(
    sample: OperatorSample, device: DeviceKind, predictor: FittedPredictor
) -> Row | None:
    """An operator's pass beside its prediction, as layers are made of it.

    None of a product's single gradients, which layers only have together, and where no law covers
    the class.
    """
    precision, op = _precision(sample.precision), sample_operator(sample)
    backward = sample.phase == OperatorPhase.BACKWARD
    if sample.phase not in (OperatorPhase.FORWARD, OperatorPhase.BACKWARD) or (
        backward and op.operator in WITH_WEIGHTS
    ):
        return None
    lent = predictor.related.operators
    own = predictor.operators(device, precision) or lent(device, precision)
    launches = own and own.launches(op, backward=backward, lent=lambda: lent(device, precision))
    if not launches:
        return None
    # Alone, as it was measured: nothing hides the host's part of a launch.
    times = [max(each.floor_seconds, each.work_seconds + each.launch_seconds) for each in launches]
    answer = Prediction(
        seconds=sum(times),
        log_halfwidth=max(each.log_halfwidth for each in launches),
        source=MEASURED,
    )
    sizes = f"{sample.batch} x [{sample.m}, {sample.n}, {sample.k}]"
    return _beside(f"{sample.operator} {sample.phase} {sizes}", answer, sample.median_seconds)


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        raise InputError(f"precision {text!a} is not known") from None


def _beside(name: str, found: Prediction, seconds: float) -> Row | None:
    if not (found.seconds > 0 and math.isfinite(found.seconds) and seconds > 0):
        return None
    return {
        "name": name,
        "predicted_seconds": found.seconds,
        "measured_seconds": seconds,
        "log_halfwidth": found.log_halfwidth,
    }


MAX_MESSAGES = 64
"""Messages of one operation and number of ranks, evenly by size: tables have a thousand."""
_OCTAVES_APART = 4
"""Every fourth octave is left out at once: four fits a link instead of one an octave (some twenty),
and the octaves beside each that is left out are still fitted."""
OCTAVES = "every fourth octave of message sizes, in turn"
ALL_OPERATORS = "operators"
COLLECTIVES = "collectives"


class UnitJudge:
    """Judged unit measurements, and what could not be predicted."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: dict[str, None] = {}

    def errors(self) -> pandas.DataFrame:
        """Figures by what was measured, device or link, precision and what the fit did not see.

        `what`: kind of layer, class of operators, `operators` for all classes, or `collectives`.
        """
        keys = ["what", "device", "precision", "left_out"]
        if not self.rows:
            return pandas.DataFrame(columns=keys)
        groups = pandas.DataFrame(self.rows).groupby(keys, sort=False)
        return pandas.DataFrame(
            {**dict(zip(keys, key, strict=True)), **errors_of(rows)} for key, rows in groups
        )

    def layers(
        self, samples: Sequence[LayerSample], fit_of: Callable[[LayerSample], FittedPredictor],
        left: str,
    ) -> None:  # fmt: skip
        """Embedding, transformer layers and head apart: they have laws of their own."""
        for sample in samples:
            try:
                kind = device_kind_of(sample.device, load_catalogue())
                found = judged_layer(sample, kind, fit_of(sample))
            except InputError as fault:
                self.notes[f"a layer of {sample.device} is not judged: {fault}"] = None
                continue
            self._add(found, f"{sample.layer} layers", sample.device, sample.precision, left)

    def operators(
        self, samples: Sequence[OperatorSample], predictor: FittedPredictor, left: str
    ) -> None:
        """All operators of a device together, and class by class."""
        for sample in samples:
            try:
                kind = device_kind_of(sample.device, load_catalogue())
                found = judged_operator(sample, kind, predictor)
            except InputError as fault:
                note = f"a {sample.operator} of {sample.device} is not judged: {fault}"
                self.notes[note] = None
                continue
            for what in (ALL_OPERATORS, sample.operator):
                self._add(found, what, sample.device, sample.precision, left)

    def links(
        self, samples: Sequence[LinkSample], fit_of: Callable[[LinkSample], FittedPredictor],
        left: str,
    ) -> None:  # fmt: skip
        """Messages of each link."""
        for link in dict.fromkeys(each.link for each in samples):
            for sample in _thinned([each for each in samples if each.link == link]):
                self._add(judged_link(sample, fit_of(sample)), COLLECTIVES, link, "", left)

    def _add(self, found: Row | None, what: str, device: str, precision: str, left: str) -> None:
        if found is not None:
            place = {"what": what, "device": device, "precision": precision, "left_out": left}
            self.rows.append({**place, **found})


def left_out(populations: Sequence[ProfileSet], whole: FittedPredictor) -> UnitJudge:
    """Sizes, devices, messages and numbers of ranks left out in turn; `whole`: fitted on all."""
    judge = UnitJudge()
    _sizes(populations, judge)
    _devices(populations, whole, judge)
    for link in dict.fromkeys(each.link for one in populations for each in one.links):
        _messages(link, populations, judge)
    return judge


def other_folder(populations: Sequence[ProfileSet], predictor: FittedPredictor) -> UnitJudge:
    """Everything of a folder that was not fitted."""
    judge, left = UnitJudge(), "not fitted"
    judge.layers(_all(populations, "layers"), lambda _: predictor, left)
    judge.operators(_all(populations, "operators"), predictor, left)
    judge.links(_all(populations, "links"), lambda _: predictor, left)
    return judge


def _all(populations: Sequence[ProfileSet], name: str) -> list[Any]:
    return [sample for each in populations for sample in getattr(each, name)]


def _sizes(populations: Sequence[ProfileSet], judge: UnitJudge) -> None:
    layers: list[LayerSample] = _all(populations, "layers")
    for device, precision in dict.fromkeys((each.device, each.precision) for each in layers):
        mine = [each for each in layers if (each.device, each.precision) == (device, precision)]
        sizes = sorted({each.hidden_size for each in mine})
        if len(sizes) > 1:
            fits = {size: _fit_without_size(populations, device, size) for size in sizes}
            judge.layers(
                mine,
                lambda sample, fits=fits: fits[sample.hidden_size],  # type: ignore[misc]
                f"each of hidden {', '.join(map(str, sizes))}",
            )


def _fit_without_size(populations: Sequence[ProfileSet], device: str, size: int) -> FittedPredictor:
    """Fitted on the device's layers and operators of other hidden sizes, without links.

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
    return fit_populations(tuple(each for each in kept if each.layers or each.operators))


def _devices(populations: Sequence[ProfileSet], whole: FittedPredictor, judge: UnitJudge) -> None:
    """A device's laws come from its own samples alone: without it the others stay as they are."""
    layers: list[LayerSample] = _all(populations, "layers")
    operators: list[OperatorSample] = _all(populations, "operators")
    laws = whole.laws
    devices = [each.device for each in layers] + [each.device for each in operators]
    for device in dict.fromkeys(devices):
        predictor = FittedPredictor(
            replace(
                laws,
                layers=tuple(law for law in laws.layers if law.device != device),
                operators=tuple(law for law in laws.operators if law.device != device),
            )
        )
        judge.layers(
            [each for each in layers if each.device == device],
            lambda _, predictor=predictor: predictor,  # type: ignore[misc]
            "the device",
        )
        mine = [each for each in operators if each.device == device]
        judge.operators(mine, predictor, "the device")


def _messages(link: str, populations: Sequence[ProfileSet], judge: UnitJudge) -> None:
    mine = [each for each in _all(populations, "links") if each.link == link]
    octaves = {
        fold: _fit_without(populations, link, _fold, fold) for fold in sorted(set(map(_fold, mine)))
    }
    judge.links(mine, lambda sample: octaves[_fold(sample)], OCTAVES)
    # A send is always between two: it stays when collectives among two are left out.
    groups = [each for each in mine if _ranks(each)]
    ranks = sorted(set(map(_ranks, groups)))
    if len(ranks) > 1:
        fits = {count: _fit_without(populations, link, _ranks, count) for count in ranks}
        what = f"each of {', '.join(map(str, ranks))} ranks"
        judge.links(groups, lambda sample: fits[_ranks(sample)], what)


def _fit_without(
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
    """Ranks of a collective; 0 of sends."""
    return 0 if sample.operation in SENDS else sample.group_size


def _fold(sample: LinkSample) -> int:
    return int(math.log2(sample.message_bytes)) % _OCTAVES_APART


def _thinned(samples: Sequence[LinkSample]) -> Iterator[LinkSample]:
    """At most `MAX_MESSAGES` of each operation and number of ranks, evenly by size."""
    groups: dict[tuple[str, int, int], list[LinkSample]] = {}
    for each in samples:
        groups.setdefault((each.operation, each.group_size, each.nodes), []).append(each)
    for group in groups.values():
        group.sort(key=lambda each: each.message_bytes)
        step = max(1.0, len(group) / MAX_MESSAGES)
        yield from (group[int(at * step)] for at in range(int(len(group) / step)))
