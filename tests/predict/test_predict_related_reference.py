"""Published kinds predicted by the others, each chip left out: what nobody measured, and one point.

`pytest -s` prints the table that docs/device-kinds.md quotes. A 16-bit layer's truth is the sum of
the kind's own operators (Megatron-LM's unfused kernels), a float32 layer's its own measured time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from predict_reference import needs_reference, spec
from predict_samples import REFERENCE, layer_sample

from hetplan.benchmarks.accuracy.unit import read_unit
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import Kernels
from hetplan.model.spec import LayerKind
from hetplan.predict.composed import layer_prediction
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.laws import FittedLaws
from hetplan.predict.layer_answer import LayerShape
from hetplan.predict.layer_laws import fit_layer_laws, sample_model
from hetplan.predict.operator_index import index_operators
from hetplan.predict.operator_laws import fit_operator_laws
from hetplan.predict.related_kinds import same_chip
from hetplan.profiling.samples import LayerSample

pytestmark = needs_reference

UNFUSED = Kernels(
    fused_attention=False, attention_dropout=True, hidden_dropout=True, fused_loss=False
)
KINDS = {kind.kind: kind for kind in load_catalogue()}


@dataclass(frozen=True, slots=True)
class Row:
    """One prediction of one pass of a layer on a kind that was left out."""

    kind: str
    log_error: float
    log_halfwidth: float


@lru_cache(maxsize=1)
def published() -> tuple[FittedLaws, tuple[LayerSample, ...]]:
    """Laws of everything that was published, and the whole layers among it (tp 1)."""
    data = read_unit(REFERENCE)
    operators = [row for population in data.populations for row in population.operators]
    layers = [
        row
        for population in data.populations
        for row in population.layers
        if row.tp == 1 and row.layer == "transformer" and row.phase in ("forward", "backward")
    ]
    laws = FittedLaws(
        hetplan_version="0",
        layers=fit_layer_laws(layers),
        links=(),
        populations=(),
        notes=(),
        operators=fit_operator_laws(operators),
    )
    return laws, tuple(layers)


def without_chip(laws: FittedLaws, kind: DeviceKind) -> FittedLaws:
    def stays(name: str) -> bool:
        other = KINDS.get(name)
        return name != kind.kind and (other is None or not same_chip(other, kind))

    return replace(
        laws,
        layers=tuple(law for law in laws.layers if stays(law.device)),
        operators=tuple(law for law in laws.operators if stays(law.device)),
    )


def half_precision_layers(laws: FittedLaws, kind: DeviceKind) -> Iterator[LayerSample]:
    """Layers of three sizes as the sum of the kind's own operators."""
    own = index_operators(laws.operators)
    for name in ("OPT-350", "GPT-Neo-2.7", "OPT-30"):
        for microbatch in (1, 4):
            for phase in ("forward", "backward"):
                shape = LayerShape(microbatch, 2048, 1, Precision.FLOAT16, UNFUSED)
                found = layer_prediction(
                    own,
                    kind,
                    spec(name),
                    LayerKind.TRANSFORMER,
                    shape=shape,
                    backward=phase == "backward",
                )
                assert found is not None
                yield layer_sample(
                    spec(name),
                    found.seconds,
                    phase=phase,
                    microbatch=microbatch,
                    precision=Precision.FLOAT16,
                    device=kind.kind,
                )


def predicted(predictor: FittedPredictor, sample: LayerSample, kernels: Kernels) -> Row:
    ask = predictor.backward if sample.phase == "backward" else predictor.forward
    answer = ask(
        KINDS[sample.device],
        sample_model(sample),
        LayerKind(sample.layer),
        microbatch_size=sample.microbatch_size,
        sequence_length=sample.sequence_length,
        tp=sample.tp,
        precision=Precision(sample.precision),
        kernels=kernels,
    )
    error = math.log(sample.median_seconds / answer.seconds)
    return Row(sample.device, error, answer.log_halfwidth)


def first_point(samples: Sequence[LayerSample], phase: str) -> LayerSample:
    """The smallest model at its largest microbatch."""
    same = [sample for sample in samples if sample.phase == phase]
    least = min(sample.hidden_size for sample in same)
    return max(
        (sample for sample in same if sample.hidden_size == least),
        key=lambda sample: sample.microbatch_size,
    )


def judged(
    laws: FittedLaws, samples: Sequence[LayerSample], kernels: Kernels
) -> tuple[list[Row], list[Row]]:
    """Without a point, and with one; the points themselves are not judged."""
    points = [first_point(samples, phase) for phase in ("forward", "backward")]
    rest = [sample for sample in samples if sample not in points]
    rest = [s for s in rest if s.hidden_size != points[0].hidden_size] or rest
    without = FittedPredictor(laws)
    with_points = FittedPredictor(replace(laws, layers=(*laws.layers, *fit_layer_laws(points))))
    return (
        [predicted(without, sample, kernels) for sample in rest],
        [predicted(with_points, sample, kernels) for sample in rest],
    )


def relative(row: Row) -> float:
    return abs(math.expm1(-row.log_error))


def show(title: str, none: Sequence[Row], one: Sequence[Row]) -> tuple[float, float]:
    """Prints one line per kind and of all; mean errors without and with a point."""
    print(f"\n{title}\n{'kind':26}{'rows':>5}  no point  one point")
    for kind in (*dict.fromkeys(row.kind for row in none), "all"):
        lines = [[row for row in rows if kind in ("all", row.kind)] for rows in (none, one)]
        means = [statistics.fmean(map(relative, rows)) for rows in lines]
        print(f"{kind:26}{len(lines[0]):>5}{means[0]:>9.1%}{means[1]:>10.1%}")
    for name, rows in (("no point", none), ("one point", one)):
        inside = statistics.fmean(abs(row.log_error) <= row.log_halfwidth for row in rows)
        width = statistics.fmean(row.log_halfwidth for row in rows)
        print(f"{name}: {inside:.0%} inside the 90 % interval, half-width {width:.2f} (log)")
    return means[0], means[1]


def coverage(rows: Sequence[Row]) -> float:
    return statistics.fmean(abs(row.log_error) <= row.log_halfwidth for row in rows)


def test_half_precision_layers_of_six_kinds() -> None:
    laws, _ = published()
    none: list[Row] = []
    one: list[Row] = []
    names = {law.device for law in laws.operators if law.precision == "float16"}
    for name in sorted(names):
        samples = list(half_precision_layers(laws, KINDS[name]))
        without, with_point = judged(without_chip(laws, KINDS[name]), samples, UNFUSED)
        none += without
        one += with_point
    assert len(names) == 6
    mean_none, mean_one = show("16 bit, sums of operators", none, one)
    assert mean_none < 0.17
    assert mean_one < mean_none
    assert coverage(none) >= 0.85
    assert coverage(one) >= 0.85
    assert statistics.fmean(row.log_halfwidth for row in none) < 0.6  # a datasheet's is about .45


def test_float32_layers_of_seven_kinds() -> None:
    laws, layers = published()
    none: list[Row] = []
    one: list[Row] = []
    kernels = Kernels(fused_attention=False, fused_loss=False)
    for name in sorted({sample.device for sample in layers}):
        samples = [sample for sample in layers if sample.device == name]
        without, with_point = judged(without_chip(laws, KINDS[name]), samples, kernels)
        none += without
        one += with_point
    mean_none, mean_one = show("float32, whole layers", none, one)
    assert mean_none < 0.25
    assert mean_one < mean_none
    assert coverage(none) >= 0.7
    assert coverage(one) >= 0.7
