"""Laws of whole layers carried to a kind that has none: through what is assumed of both kinds.

A law of whole layers cannot always tell its columns apart (with one hidden size all of them grow
alike), so its coefficients are not carried one by one. What is carried is how far a kind lies from
what would be assumed of it without the law, A: the sum of operators that it has or that others lend
it (`related_operators`), where no operators were measured the datasheet.

    same chip     seconds = law_s(x) * A_t(x) / A_s(x)
    other kinds   seconds = A_t(x) * exp(sum_s w_s d_s / (PRIOR_WEIGHT + sum_s w_s)),
                  d_s = mean of log(law_s(x') / A_s(x')) over sizes x' that s measured

with weights by likeness, and PRIOR_WEIGHT for the assumption itself (d = 0). The second form never
asks a law for sizes that its kind did not measure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict import datasheet
from hetplan.predict.columns import layer_columns
from hetplan.predict.laws import LayerLaw
from hetplan.predict.layer_answer import LayerShape, by_layer_law
from hetplan.predict.predictor import Prediction
from hetplan.predict.related_kinds import Rates, likeness, same_chip
from hetplan.predict.related_operators import FEWEST_CHIPS, chip_halfwidth, different_chips
from hetplan.profiling.samples import Phase

SOURCE = "related"

MOST_NAMED = 3
"""Kinds that a note names; more are counted."""

PRIOR_WEIGHT = 1.0
"""Of the assumption against the laws of kinds: as much as one kind just like it."""

# Sailor's float32 transformer layers of seven NVIDIA kinds, each chip left out: 89 % of the errors
# lie within it, their mean is 19 % (tests/predict/test_predict_related_reference.py).
OTHER_KINDS_LOG_HALFWIDTH = 0.46


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One pass of one layer at one size."""

    model: ModelSpec
    layer: LayerKind
    shape: LayerShape
    is_backward: bool

    @property
    def phase(self) -> str:
        """A `Phase` value."""
        return (Phase.BACKWARD if self.is_backward else Phase.FORWARD).value


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedLayer:
    """A law of whole layers and the figures of the kind that it was measured on."""

    law: LayerLaw
    rates: Rates
    offsets: dict[tuple[Kernels, Assumed], float] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What `offset` worked out, which no size that is asked for changes."""


def paper(rates: Rates, asked: Asked) -> Prediction:
    """The datasheet's prediction on a kind in the number format that its rates are of."""
    answer = datasheet.backward if asked.is_backward else datasheet.forward
    shape = asked.shape
    return answer(
        _in_format(rates, shape.precision.value),
        asked.model,
        asked.layer,
        microbatch_size=shape.microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        precision=shape.precision,
        kernels=shape.kernels,
    )


def _in_format(rates: Rates, precision: str) -> DeviceKind:
    """The kind with the rate of its number format under the job's name for it (TF32: float32)."""
    if rates.number_format == precision:
        return rates.kind
    others = tuple(pair for pair in rates.kind.peak_flops_per_second if pair[0] != precision)
    return replace(rates.kind, peak_flops_per_second=(*others, (precision, rates.flops_per_second)))


Assumed = Callable[[Rates, Asked], Prediction]
"""What is assumed of a kind without its whole layers: the sum of its operators, or `paper`."""


def related_layer(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, assumed: Assumed
) -> Prediction | None:
    """From laws of this layer and phase on other kinds; None where there are none."""
    chip = [source for source in sources if same_chip(source.rates.kind, target.kind)]
    found = [_of_chip(source, target, asked, assumed) for source in chip]
    if sources:
        found.append(_of_others(sources, target, asked, assumed))
    return min(found, key=lambda each: each.log_halfwidth, default=None)


def _of_chip(source: RatedLayer, target: Rates, asked: Asked, assumed: Assumed) -> Prediction:
    there = asked.shape._replace(precision=Precision(source.law.precision))
    own = by_layer_law(source.law, asked.model, asked.layer, there)
    ratio = (
        assumed(target, asked).seconds / assumed(source.rates, replace(asked, shape=there)).seconds
    )
    kind = source.rates.kind
    what = f"{asked.layer.value} {asked.phase}"
    return Prediction(
        seconds=own.seconds * ratio,
        log_halfwidth=math.hypot(own.log_halfwidth, chip_halfwidth(kind, target.kind)),
        source=SOURCE,
        extrapolating=(
            f"{target.kind.kind} {what} not measured: as {kind.kind}, the same chip",
            *own.extrapolating,
        ),
    )


def _of_others(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, assumed: Assumed
) -> Prediction:
    weights = [likeness(source.rates, target) for source in sources]
    offsets = [offset(source, asked.shape.kernels, assumed) for source in sources]
    total = sum(weight * each for weight, each in zip(weights, offsets, strict=True))
    there = assumed(target, asked)
    halfwidth = OTHER_KINDS_LOG_HALFWIDTH
    if near_chips(sources, target.kind) < FEWEST_CHIPS:
        # Too few of this maker's to say how its kinds differ: no better than a datasheet.
        halfwidth = max(halfwidth, there.log_halfwidth)
    names = tuple(dict.fromkeys(source.rates.kind.kind for source in sources))
    kinds = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} other kinds"
    return Prediction(
        seconds=there.seconds * math.exp(total / (PRIOR_WEIGHT + sum(weights))),
        log_halfwidth=halfwidth,
        source=SOURCE,
        extrapolating=(
            f"{target.kind.kind} {asked.layer.value} {asked.phase} not measured: what is "
            f"assumed of it, corrected as for {kinds}",
        ),
    )


def near_chips(sources: Sequence[RatedLayer], kind: DeviceKind) -> int:
    """Chips of the kind's maker among the sources."""
    kinds = (source.rates.kind for source in sources)
    return different_chips(each for each in kinds if each.vendor == kind.vendor)


# A sample of a whole layer does not say which kernels ran.
_LIKELY_KERNELS = (DEFAULT_KERNELS, Kernels(fused_attention=False, fused_loss=False))


def offset(source: RatedLayer, kernels: Kernels, assumed: Assumed) -> float:
    """Mean of log(law / what is assumed of its kind) at sizes that the kind measured.

    With the kernels that are asked for. Where those are further off than kinds differ, others ran
    (attention whose scores go through memory, say): then with the likely ones that lie nearest.
    """
    key = (kernels, assumed)
    if key not in source.offsets:
        found = _offset(source, kernels, assumed)
        if abs(found) > OTHER_KINDS_LOG_HALFWIDTH:
            found = min((_offset(source, each, assumed) for each in _LIKELY_KERNELS), key=abs)
        source.offsets[key] = found
    return source.offsets[key]


def _offset(source: RatedLayer, kernels: Kernels, assumed: Assumed) -> float:
    logs = []
    for asked in measured_sizes(source.law, kernels):
        seconds = law_seconds(source.law, asked)
        if seconds > 0:
            logs.append(math.log(seconds / assumed(source.rates, asked).seconds))
    return statistics.fmean(logs) if logs else 0.0


def law_seconds(law: LayerLaw, asked: Asked) -> float:
    """The law's sum of columns, without its tables."""
    shape = asked.shape
    columns = layer_columns(
        asked.model,
        asked.layer,
        microbatch_size=shape.microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        bytes_per_element=shape.precision.bytes_per_element,
    )
    return sum(term.coefficient * columns.value(term.column) for term in law.terms)


def measured_sizes(law: LayerLaw, kernels: Kernels) -> Iterator[Asked]:
    """The least and the most that a law's kind measured, as plain GPT layers."""
    ranges = {measured.quantity: measured for measured in law.ranges}
    ends = {tuple(each.least for each in law.ranges), tuple(each.most for each in law.ranges)}
    for values in sorted(ends):
        size = dict(zip(ranges, map(int, values), strict=True))
        yield Asked(
            model=_plain(size["hidden"], size.get("vocabulary", _VOCABULARY)),
            layer=LayerKind(law.layer),
            shape=LayerShape(
                microbatch_size=size["microbatch"],
                sequence_length=size["sequence"],
                tp=size["tp"],
                precision=Precision(law.precision),
                kernels=kernels,
            ),
            is_backward=law.phase == Phase.BACKWARD,
        )


_VOCABULARY = 50000
"""Of a layer whose time does not depend on it."""


def _plain(hidden: int, vocabulary: int) -> ModelSpec:
    heads = max(1, hidden // 64)
    return plain_model(
        name="sizes",
        architecture=Architecture.GPT,
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab_size=vocabulary,
        max_sequence_length=1 << 20,
    )
