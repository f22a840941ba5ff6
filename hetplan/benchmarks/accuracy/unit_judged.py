"""What does the predictor say of one unit measurement?"""

from __future__ import annotations

import math

from hetplan.benchmarks.accuracy.judge import Judged
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.predict import datasheet
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.layer_laws import sample_model
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import (
    LayerSample,
    LinkOperation,
    LinkSample,
    OperatorSample,
    Phase,
)

_SENDS = (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)


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
        # Never used: a prediction from it is no prediction of this link.
        bandwidth_bytes_per_second=1.0,
        latency_seconds=0.0,
        transport=Transport.HOST_STAGED if sample.backend == "gloo" else Transport.DEVICE_DIRECT,
        samples=sample.link,
    )
    name = f"{sample.operation} of {sample.message_bytes} B among {sample.group_size}"
    if sample.operation in _SENDS:
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
    if found.source == datasheet.SOURCE:
        return None
    return _judged(name, found, sample.median_seconds)


def judged_operator(
    sample: OperatorSample, device: DeviceKind, predictor: FittedPredictor
) -> Judged | None:
    """An operator's pass beside its prediction; None where no law covers it."""
    return None


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        raise InputError(f"precision {text!a} is not known") from None


def _judged(name: str, found: Prediction, seconds: float) -> Judged | None:
    if not (found.seconds > 0 and math.isfinite(found.seconds) and seconds > 0):
        return None
    spread = math.exp(found.log_halfwidth)
    return Judged(
        name=name,
        predicted=found.seconds,
        measured=seconds,
        lower=found.seconds / spread,
        upper=found.seconds * spread,
    )
