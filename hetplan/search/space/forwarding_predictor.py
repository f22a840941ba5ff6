"""Predictors that forward every question: to shift, record or cache the answers.

Many shapes ask the same about a layer: context parallelism and data parallelism do not change what
is predicted, only what is made of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.calibration.applied import corrected
from hetplan.predict.calibration.values import Calibration
from hetplan.predict.predictor import Prediction, Predictor, SendLaw, link_cause


@dataclass(frozen=True, slots=True)
class ForwardingPredictor:
    """A `Predictor` that answers as another one does."""

    predictor: Predictor

    @property
    def calibration(self) -> Calibration | None:
        """What measured steps say about the other one."""
        return getattr(self.predictor, "calibration", None)

    def transform(self, device: DeviceKind, found: Prediction) -> Prediction:
        """What is answered for a time on a device."""
        del device
        return found

    def on_message(self, link: Link, message_bytes: float) -> None:
        """A message over a link was asked for."""

    def layer_pass(
        self, which: str, device: DeviceKind, model: ModelSpec, layer: LayerKind, **shape: Any
    ) -> Prediction:
        """The `forward` or `backward` time of one layer on one tensor-parallel rank."""
        asked = getattr(self.predictor, which)
        return self.transform(device, asked(device, model, layer, **shape))

    def forward(
        self, device: DeviceKind, model: ModelSpec, layer: LayerKind, **shape: Any
    ) -> Prediction:
        """Forward time of one layer; `shape` as of `Predictor.forward`."""
        return self.layer_pass("forward", device, model, layer, **shape)

    def backward(
        self, device: DeviceKind, model: ModelSpec, layer: LayerKind, **shape: Any
    ) -> Prediction:
        """Backward time of the same."""
        return self.layer_pass("backward", device, model, layer, **shape)

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        found = self.predictor.optimizer_update(device, optimizer, parameters, precision)
        return self.transform(device, found)

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """Point-to-point law of a link."""
        self.on_message(link, message_bytes)
        return self.predictor.send(link, message_bytes, nodes=nodes)

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
        return self.predictor.collective(
            link, operation, group_size, message_bytes, nodes=nodes, groups=groups
        )


@dataclass(frozen=True, slots=True)
class ShiftedPredictor(ForwardingPredictor):
    """The world in which every prediction of one device kind lies at an end of its interval."""

    kind: str
    sign: float
    """-1: faster, 1: slower."""

    def transform(self, device: DeviceKind, found: Prediction) -> Prediction:
        """Moved where it is of the kind."""
        if device.kind != self.kind:
            return found
        return corrected(found, math.exp(self.sign * found.log_halfwidth))


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
    """Asks about layers of one model, with several vocabularies, on living devices, once each."""

    _known: dict[tuple[object, ...], Prediction] = field(
        default_factory=dict, repr=False, compare=False
    )

    def layer_pass(
        self, which: str, device: DeviceKind, model: ModelSpec, layer: LayerKind, **shape: Any
    ) -> Prediction:
        """As the predictor says."""
        # Devices are those of one cluster, models differ in vocabulary and in the layer they show.
        own = (which, id(device), model.vocab_size, model.layer_runs, model.num_mtp_layers, layer)
        key = (*own, *shape.values())
        found = self._known.get(key)
        if found is None:
            asked = getattr(self.predictor, which)
            found = self._known[key] = asked(device, model, layer, **shape)
        return found
