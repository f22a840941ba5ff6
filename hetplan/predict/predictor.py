"""What the cost model asks of measurements: times with intervals, for shapes nobody measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time by regression and how far it can be off."""

    seconds: float
    log_halfwidth: float
    """The 90 % interval is seconds * exp(-+ log_halfwidth)."""
    source: str
    """`measured` (regression on samples of this device or link) or `datasheet`."""
    extrapolating: tuple[str, ...] = ()
    """What lies outside the measured range, as in `hidden 16384 > 8192 measured`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLaw:
    """Time of a point-to-point transfer: a rendezvous, then bytes over the wire.

    With both sides ready at the same moment the data has arrived after
    `rendezvous_latency_seconds + bytes * seconds_per_byte`; with the receiver ready long before,
    after `wire_latency_seconds + bytes * seconds_per_byte` (wire <= rendezvous).
    """

    rendezvous_latency_seconds: float
    wire_latency_seconds: float
    seconds_per_byte: float
    log_halfwidth: float
    source: str
    extrapolating: tuple[str, ...] = ()


class Predictor(Protocol):
    """Regression from samples, or from datasheet figures where there are none."""

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
    ) -> Prediction:
        """Forward time of one layer on one tensor-parallel rank, without communication."""
        ...

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
    ) -> Prediction:
        """Backward time (input and weight gradients) of the same, without recomputation."""
        ...

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        ...

    def send(self, link: Link, message_bytes: float) -> SendLaw:
        """Point-to-point law of a link, right for messages about this large."""
        ...

    def collective(
        self, link: Link, operation: str, group_size: int, message_bytes: float
    ) -> Prediction:
        """Time of a collective (a `LinkOperation` value) among `group_size` ranks over a link.

        `message_bytes` as in `LinkSample.message_bytes`. Groups of one cost nothing.
        """
        ...
