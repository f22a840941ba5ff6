"""What does the cost model hear when Sailor's profiles and fits are all that was measured?

A predictor (`hetplan.predict.predictor.Predictor`) that looks up and fits nothing: layers by (GPU,
microbatch size, tp) as they were profiled, sends and reductions by the fits of the path that a
link's `samples` names (`path_name`). Profiled times hold the tensor-parallel communication, so
collectives inside a node cost nothing here. What was not profiled takes so long that no plan has
it: nothing is carried over from other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.sailor_plan_file import NAMES
from hetplan.benchmarks.search.sailor_files import SailorFiles
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.predictor import MEASURED, Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation

NEVER_SECONDS = 1e5
"""Of a layer that was not profiled."""
_NOTHING_SECONDS = 1e-12
"""Of what Sailor charges nothing for; predictions are above 0."""
_NAMES = dict(NAMES)


def path_name(one: tuple[str, str], other: tuple[str, str]) -> str:
    """`Link.samples` of the path between (zone, GPU) and (zone, GPU)."""
    return " ".join((*one, *other))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePredictor:
    """Sailor's measurements of one model."""

    files: SailorFiles

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
        """Forward seconds of one layer, its tensor-parallel communication with it."""
        found = self.files.times.get((_NAMES.get(device.kind, ""), microbatch_size, tp))
        return _said(NEVER_SECONDS if found is None else _of(layer, found.forward_seconds))

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
        """Backward seconds of the same."""
        found = self.files.times.get((_NAMES.get(device.kind, ""), microbatch_size, tp))
        return _said(NEVER_SECONDS if found is None else _of(layer, found.backward_seconds))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """The profiled update, whatever the number of parameters: Sailor has one time of each."""
        gpu = _NAMES.get(device.kind, "")
        updates = [
            max(each.update_seconds)
            for (name, _, tp), each in self.files.times.items()
            if name == gpu and tp == 1
        ]
        return _said(max(updates, default=NEVER_SECONDS))

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """By the fit of the link's path; a straight line through that message."""
        seconds = self._path_seconds(link, message_bytes)
        return SendLaw(
            rendezvous_latency_seconds=0.0,
            wire_latency_seconds=0.0,
            seconds_per_byte=seconds / message_bytes if message_bytes else 0.0,
            log_halfwidth=0.0,
            source=MEASURED,
        )

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
        """A ring over the link's path; nothing inside a node."""
        if group_size < 2 or not message_bytes or link.samples is None:
            return _said(_NOTHING_SECONDS)
        rounds = 2 if operation == LinkOperation.ALL_REDUCE else 1
        part = self._path_seconds(link, message_bytes / group_size)
        return _said(rounds * (group_size - 1) * part)

    def _path_seconds(self, link: Link, size_bytes: float) -> float:
        if not size_bytes:
            return 0.0
        if link.samples is None:
            return size_bytes / link.bandwidth_bytes_per_second
        zone, gpu, to_zone, to_gpu = link.samples.split(" ")
        fit = self.files.fit((zone, gpu, 1), (to_zone, to_gpu, 1))
        try:
            return fit.seconds(size_bytes)
        except InputError:
            # Below the sizes that were measured the parabola falls under zero.
            return size_bytes / link.bandwidth_bytes_per_second


def _of(layer: LayerKind, seconds: tuple[float, ...]) -> float:
    if layer is LayerKind.EMBEDDING:
        return seconds[0]
    if layer is LayerKind.HEAD:
        return seconds[-1]
    return sum(seconds[1:-1]) / len(seconds[1:-1])


def _said(seconds: float) -> Prediction:
    return Prediction(seconds=seconds, log_halfwidth=0.0, source=MEASURED)
