"""Why the interval of the best plan grew: predictions that turned out to be known less well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.law_parts import UNCHECKED
from hetplan.predict.laws import ALL_LAYERS
from hetplan.predict.layer.answer import measured_itself
from hetplan.predict.predictor import LayerQuery
from hetplan.search.asked import UPDATE, Asked, AskingPlan

_MIN_VALUE = 0.02  # relative; what widens by less is not worth a line
_MAX_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What sets the interval of one prediction."""

    asked: str
    words: str
    assumed: bool
    """Whether nothing has checked it yet."""


class Stand(Protocol):
    """What is needed of how things stand."""

    @property
    def log_halfwidth(self) -> float:
        """Of the best plan's interval."""
        ...

    @property
    def asking(self) -> tuple[AskingPlan, ...]:
        """The near-best plans, best first."""
        ...

    @property
    def bases(self) -> tuple[Basis, ...]:
        """Of everything that they ask."""
        ...


def bases(
    predictor: FittedPredictor, model: ModelSpec, job: Job, asked: Sequence[Asked]
) -> tuple[Basis, ...]:
    """What sets the interval of each of these predictions of a device's time."""
    return tuple(_basis(predictor, model, job, each) for each in asked if each.layer)


def _basis(predictor: FittedPredictor, model: ModelSpec, job: Job, asked: Asked) -> Basis:
    layer = ALL_LAYERS if asked.layer == UPDATE else asked.layer
    laws = [
        law
        for law in predictor.laws.layers
        if (law.device, law.layer, law.precision) == (asked.cause, layer, job.precision.value)
    ]
    if not laws:
        return Basis(asked=asked.name, words="no samples of it", assumed=True)
    wide = max(laws, key=lambda law: law.log_halfwidth)
    if asked.layer != UPDATE:
        query = LayerQuery(
            model=model,
            layer=LayerKind(asked.layer),
            microbatch_size=asked.microbatch_size,
            sequence_length=job.sequence_length,
            tp=asked.tp,
            precision=job.precision,
        )
        if all(measured_itself(law, query) for law in laws):
            words = "how far its own measurement scatters and repeats"
            return Basis(asked=asked.name, words=words, assumed=False)
    return Basis(asked=asked.name, words=wide.calibration, assumed=UNCHECKED in wide.calibration)


def explain_growth(before: Stand, after: Stand) -> tuple[str, ...]:
    """Why the best plan's interval is wider than before; nothing where it is not."""
    if after.log_halfwidth <= before.log_halfwidth * (1 + _MIN_VALUE) or not (
        before.asking and after.asking
    ):
        return ()
    lines = ["The interval is wider than before:"]
    best = after.asking[0]
    if best.plan != before.asking[0].plan:
        lines.append("another plan is the best one now;")
    was = {part.asked: part.log_halfwidth for plan in before.asking for part in plan.parts.parts}
    found = []
    for part in best.parts.parts:
        old = was.get(part.asked)
        if old is not None and part.log_halfwidth > old * (1 + _MIN_VALUE):
            found.append((part.seconds * (part.log_halfwidth - old), part.asked, old, part))
    found.sort(key=lambda each: -each[0])
    old_bases, new_bases = ({each.asked: each for each in view.bases} for view in (before, after))
    for _, name, old, part in found[:_MAX_LINES]:
        first, then = old_bases.get(name), new_bases.get(name)
        why = f", by {then.words}" if then else ""
        thought = f" (by {first.words})" if first else ""
        truer = first is not None and then is not None and first.assumed and not then.assumed
        lines.append(
            f"{name} is known to +{math.expm1(part.log_halfwidth):.0%}{why}; it was taken to be "
            f"known to +{math.expm1(old):.0%}{thought}"
            f"{': that was an assumption, this is a check' if truer else ''};"
        )
    if len(lines) == 1:
        lines.append("more of its step stands on predictions that are known less well.")
    return (
        *lines[:-1],
        lines[-1].rstrip(";."),
    )
