"""A predictor that answers a question about a layer once: many shapes ask the same.

Context parallelism and data parallelism do not change what is predicted, only what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.predictor import Prediction
from hetplan.search.through import Through

_Asked = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Remembered(Through):
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
