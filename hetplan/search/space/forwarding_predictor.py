"""Predictors that forward every question: to shift, record or cache the answers.

Many shapes ask the same about a layer: context parallelism and data parallelism do not change what
is predicted, only what is made of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
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

    def forward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """Forward time of one layer on one tensor-parallel rank."""
        found = self.predictor.forward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            kernels=kernels,
        )
        return self.transform(device, found)

    def backward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """Backward time of the same."""
        found = self.predictor.backward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            kernels=kernels,
        )
        return self.transform(device, found)

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


_Asked = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CachingPredictor(ForwardingPredictor):
    """Asks `predictor` about layers of one model, with several vocabularies, on living devices."""

    _forward: dict[_Asked, Prediction] = field(default_factory=dict, repr=False, compare=False)
    _backward: dict[_Asked, Prediction] = field(default_factory=dict, repr=False, compare=False)

    def forward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """As the predictor says."""
        key = _key(device, model, layer, microbatch_size, sequence_length, tp, precision, kernels)
        found = self._forward.get(key)
        if found is None:
            found = self._forward[key] = self.predictor.forward(
                device,
                model,
                layer,
                microbatch_size=microbatch_size,
                sequence_length=sequence_length,
                tp=tp,
                precision=precision,
                kernels=kernels,
            )
        return found

    def backward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> Prediction:
        """As the predictor says."""
        key = _key(device, model, layer, microbatch_size, sequence_length, tp, precision, kernels)
        found = self._backward.get(key)
        if found is None:
            found = self._backward[key] = self.predictor.backward(
                device,
                model,
                layer,
                microbatch_size=microbatch_size,
                sequence_length=sequence_length,
                tp=tp,
                precision=precision,
                kernels=kernels,
            )
        return found


def _key(device: DeviceKind, model: ModelSpec, *rest: object) -> _Asked:
    # Devices are those of one cluster, models differ in vocabulary and in which layer they show.
    return (id(device), model.vocab_size, model.layer_runs, model.num_mtp_layers, *rest)
