"""What does the predictor say of one unit measurement?"""

from __future__ import annotations

import math
from functools import lru_cache

from hetplan.benchmarks.accuracy.clusters import network_named
from hetplan.benchmarks.accuracy.judge import Judged
from hetplan.benchmarks.accuracy.unit_collectives import GALVATRON_NODE, VTRAIN_V100_NODE, node_link
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.operators import WITH_WEIGHTS
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.kinds.few_points import MovedOperators
from hetplan.predict.kinds.related import Related
from hetplan.predict.layer.laws import sample_model
from hetplan.predict.operator.answer import index_operators
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
)


def judged_layer(
    sample: LayerSample, device: DeviceKind, predictor: FittedPredictor
) -> Judged | None:
    """A layer's pass beside its prediction; None of passes that no prediction is of (updates)."""
    phase = sample.phase
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        return None
    ask = predictor.forward if phase == Phase.FORWARD else predictor.backward
    found = ask(
        device,
        sample_model(sample),
        LayerKind(sample.layer),
        microbatch_size=sample.microbatch_size,
        sequence_length=sample.sequence_length,
        tp=sample.tp,
        precision=_precision(sample.precision),
    )
    name = (
        f"{sample.layer} {phase}, hidden {sample.hidden_size}, microbatch "
        f"{sample.microbatch_size}, tp {sample.tp}"
    )
    return _judged(name, found, sample.median_seconds)


def judged_link(sample: LinkSample, predictor: FittedPredictor) -> Judged | None:
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
    return _judged(name, found, sample.median_seconds)


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
        return network_named("clariden").inside_bytes_per_second
    names = dict(_KINDS)
    for kind in load_catalogue():
        if link == node_link(kind.kind) or names.get(link) == kind.kind:
            # A bridge between two devices does not join the other devices of a node.
            bridge = kind.scale_up is not None and kind.scale_up.peers == 1
            fabric = kind.host if bridge else kind.scale_up or kind.host
            if fabric is not None:
                return fabric.bandwidth_bytes_per_second
    return 1.0


class OperatorAnswers:
    """What the laws of a predictor say of single operators, as its layers are made of them."""

    def __init__(self, predictor: FittedPredictor) -> None:
        laws = predictor.laws
        self._related = Related(laws)
        self._own = index_operators(laws.operators)
        self._moved = MovedOperators(laws.operators, self._related)

    def judged(self, sample: OperatorSample, device: DeviceKind) -> Judged | None:
        """An operator's pass beside its prediction.

        None of a product's single gradients, which layers only have together, and where no law
        covers the class.
        """
        precision, op = _precision(sample.precision), sample_operator(sample)
        backward = sample.phase == OperatorPhase.BACKWARD
        if sample.phase not in (OperatorPhase.FORWARD, OperatorPhase.BACKWARD) or (
            backward and op.operator in WITH_WEIGHTS
        ):
            return None
        index = self._moved.index(device, precision, self._own)
        here = index.get((device.kind, precision.value))
        if here is None:
            here = self._related.operators(device, precision)
        if here is None:
            return None
        launches = here.launches(
            op, backward=backward, lent=lambda: self._related.operators(device, precision)
        )
        if launches is None:
            return None
        # Alone, as it was measured: nothing hides the host's part of a launch.
        times = [
            max(each.floor_seconds, each.work_seconds + each.launch_seconds) for each in launches
        ]
        seconds = sum(times)
        halfwidth = max((each.log_halfwidth for each in launches), default=0.0)
        sizes = f"{sample.batch} x [{sample.m}, {sample.n}, {sample.k}]"
        name = f"{sample.operator} {sample.phase} {sizes}"
        found = Prediction(seconds=seconds, log_halfwidth=halfwidth, source=MEASURED)
        return _judged(name, found, sample.median_seconds)


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        raise InputError(f"precision {text!a} is not known") from None


def _judged(name: str, found: Prediction, seconds: float) -> Judged | None:
    if not (found.seconds > 0 and math.isfinite(found.seconds) and seconds > 0):
        return None
    return Judged.around(name, found.seconds, found.log_halfwidth, seconds)
