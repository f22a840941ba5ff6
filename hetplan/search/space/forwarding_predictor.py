"""Predictors that pass every question on: to shift answers, to record questions, to ask once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.job.spec import Optimizer, Precision
from hetplan.predict.calibration.values import Calibration, corrected
from hetplan.predict.predictor import LayerQuery, Prediction, Predictor, SendLaw, link_cause


@dataclass(frozen=True, slots=True)
class ForwardingPredictor:
    """A `Predictor` that answers as another one does."""

    predictor: Predictor

    @property
    def calibration(self) -> Calibration | None:
        """What measured steps say about the other one."""
        return getattr(self.predictor, "calibration", None)

    def transform(self, device: DeviceKind, prediction: Prediction) -> Prediction:
        """What is answered for a time on a device."""
        del device
        return prediction

    def bandwidth(self, link: Link) -> float:
        """How many times the link is as fast as the other one says."""
        del link
        return 1.0

    def on_message(self, link: Link, message_bytes: float) -> None:
        """A message over a link was asked for."""

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Time of one pass of one layer on this kind of device."""
        return self.transform(device, self.predictor.layer(device, query))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        prediction = self.predictor.optimizer_update(device, optimizer, parameters, precision)
        return self.transform(device, prediction)

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """Point-to-point law of a link."""
        self.on_message(link, message_bytes)
        law = self.predictor.send(link, message_bytes, nodes=nodes)
        factor = self.bandwidth(link)
        return law if factor == 1 else replace(law, seconds_per_byte=law.seconds_per_byte / factor)

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """Time of a collective."""
        self.on_message(link, message_bytes)
        found = self.predictor.collective(
            link, operation, group_size, message_bytes, nodes=nodes, groups=groups
        )
        return corrected(found, 1.0 / self.bandwidth(link))


@dataclass(frozen=True, slots=True)
class ShiftedPredictor(ForwardingPredictor):
    """The world in which every prediction of one device kind lies at an end of its interval."""

    kind: str
    sign: float
    """-1: faster, 1: slower."""

    def transform(self, device: DeviceKind, prediction: Prediction) -> Prediction:
        """ShiftedPredictor where it is of the kind."""
        if device.kind != self.kind:
            return prediction
        return corrected(prediction, math.exp(self.sign * prediction.log_halfwidth))


@dataclass(frozen=True, slots=True)
class VariedPredictor(ForwardingPredictor):
    """Measured links are so many times as fast; in collectives their latency is, too."""

    factors: dict[str, float]
    """By name of their samples."""

    def bandwidth(self, link: Link) -> float:
        """Of the link's samples."""
        return self.factors.get(link.samples or "", 1.0)


@dataclass(frozen=True, slots=True)
class RecordingPredictor(ForwardingPredictor):
    """Notes the largest message that each link was asked for, by `link_cause`."""

    largest: dict[str, float] = field(default_factory=dict)

    def on_message(self, link: Link, message_bytes: float) -> None:
        """Note it."""
        cause = link_cause(link)
        self.largest[cause] = max(self.largest.get(cause, 0.0), message_bytes)


@dataclass(frozen=True, slots=True)
class CachingPredictor(ForwardingPredictor):
    """Asks about a layer once: many candidates have the same one.

    The layers are of one model, with several vocabularies, on devices of one cluster. Context and
    data parallelism do not change what is predicted, only what is made of it.
    """

    _layers: dict[tuple[object, ...], Prediction] = field(
        default_factory=dict, repr=False, compare=False
    )

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """As the predictor says."""
        model = query.model
        key = (
            id(device),
            model.vocab_size,
            model.layer_runs,
            model.num_mtp_layers,
            query.layer,
            query.microbatch_size,
            query.sequence_length,
            query.tp,
            query.precision,
            query.kernels,
            query.is_backward,
        )
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self.predictor.layer(device, query)
        return found
