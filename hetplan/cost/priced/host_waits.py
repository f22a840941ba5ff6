"""How long does the device wait for the host in a pass, with what else keeps it busy there?

The host launches a pass's kernels in a row and runs ahead while the device is busy, with
collectives as with anything else. A predicted layer knows nothing of them and has as its part

    wait = max(0, host - device)        so of a pass        max(0, host - device - communication)

is left, where communication is what of it runs beside no compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetplan.cost.priced.values import Part, seconds_of_parts
from hetplan.predict.layer.composed import WAIT_PART
from hetplan.predict.predictor import Prediction


def without_waits(compute: Sequence[Part], others: Iterable[Part]) -> tuple[Part, ...]:
    """A pass's compute, as it is with these others of the pass between its kernels."""
    whole = compute[0].term.prediction if compute else None
    wait = 0.0 if whole is None else _wait(whole)
    if whole is None or wait <= 0:
        return tuple(compute)
    own = [part for part in compute if part.term.prediction is whole]
    rest = [part for part in compute if part.term.prediction is not whole]
    count = sum(part.term.count for part in own)
    busy = seconds_of_parts((*rest, *others))
    if count <= 0 or busy <= 0:
        return tuple(compute)
    left = _waiting(whole, max(0.0, wait - busy / count))
    return tuple(
        replace(part, term=replace(part.term, prediction=left))
        if part.term.prediction is whole
        else part
        for part in compute
    )


def _wait(prediction: Prediction) -> float:
    return sum(part.seconds for part in prediction.parts if part.name == WAIT_PART)


def _waiting(prediction: Prediction, wait: float) -> Prediction:
    """The prediction with so much of a wait."""
    parts = tuple(
        replace(part, seconds=wait) if part.name == WAIT_PART else part
        for part in prediction.parts
        if part.name != WAIT_PART or wait > 0
    )
    seconds = sum(part.seconds for part in parts)
    spread = math.hypot(*(part.seconds * part.log_halfwidth for part in parts))
    return replace(
        prediction,
        seconds=seconds,
        log_halfwidth=spread / seconds if seconds else 0.0,
        parts=parts,
    )
