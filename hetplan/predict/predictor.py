"""What the cost model asks of measurements: times with intervals, for shapes nobody measured.

Predictions of one cause err together. A cause is a device kind, which is one word, or a link, which
goes by its samples, or by the figures of the cluster file where it has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.links import Link
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import (
    BACKWARD,
    DEFAULT_KERNELS,
    FORWARD,
    Kernels,
    Operator,
    gradient_operators,
    layer_operators,
)
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.units import format_bandwidth, format_seconds

SAMPLES_OF = "link "
_FIGURES = " link of "


@lru_cache(maxsize=4096)
def link_cause(link: Link) -> str:
    """Name under which predictions about this link err together: its samples, or its figures."""
    if link.samples is not None:
        return f"{SAMPLES_OF}{link.samples}"
    return (
        f"{link.transport.value}{_FIGURES}{format_bandwidth(link.goodput_bytes_per_second)}, "
        f"{format_seconds(link.latency_seconds)}"
    )


def is_link(cause: str) -> bool:
    """Whether a cause is a link; otherwise it is a device kind."""
    return " " in cause


def calibrated_cause(cause: str) -> str:
    """Name under which runs correct predictions of this cause.

    A link without samples goes by transport and latency: its bandwidth is a sender's share, which
    differs with the number of senders.
    """
    transport, figures, rest = cause.partition(_FIGURES)
    if not figures or cause.startswith(SAMPLES_OF):
        return cause
    return f"{transport} link without samples, {rest.rpartition(', ')[2]}"


MEASURED = "measured"
"""`Prediction.source`: regression on samples of this device or link."""
RELATED = "related"
"""`Prediction.source`: laws of related device kinds, carried by datasheet figures."""
BY_OTHERS = "others' measured"
"""`Prediction.source`: operators of this kind that other people measured and hetplan ships."""
DATASHEET = "datasheet"
"""`Prediction.source`: datasheet figures alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionPart:
    """The part of a prediction that one law says; parts of one name err together on a device."""

    name: str
    """An `OperatorClass` value, `launch`, or `wait` (the device for the host, if it has nothing
    else to do)."""
    seconds: float
    log_halfwidth: float
    """Half-width of its 90 % interval."""
    source: str = ""
    """`MEASURED` or `BY_OTHERS`, where the prediction has parts of both; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A time by regression and how far it can be off."""

    seconds: float
    log_halfwidth: float
    """The 90 % interval is seconds * exp(-+ log_halfwidth)."""
    source: str
    """`MEASURED`, `BY_OTHERS`, `RELATED` or `DATASHEET`."""
    extrapolating: tuple[str, ...] = ()
    """What lies outside the measured range, as in `hidden 16384 > 8192 measured`."""
    parts: tuple[PredictionPart, ...] = ()
    """What `seconds` is the sum of, where laws of operators gave it; empty: one law."""
    float32_sums: bool = False
    """Its products add the weights' gradients to float32 sums; otherwise what they write is as wide
    as the weights."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Where it comes from and who measured its parts."""
        return tuple(dict.fromkeys((self.source, *(p.source for p in self.parts if p.source))))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuery:
    """One pass of one layer at one size, on one tensor-parallel rank, without communication."""

    model: ModelSpec
    layer: LayerKind
    microbatch_size: int
    sequence_length: int
    tp: int
    precision: Precision
    kernels: Kernels = DEFAULT_KERNELS
    is_backward: bool = False
    """The gradients of inputs and weights, without recomputation; otherwise the forward pass."""

    @property
    def phase(self) -> str:
        """`forward` or `backward`, as samples and laws name it."""
        return BACKWARD if self.is_backward else FORWARD

    def operators(self) -> tuple[Operator, ...]:
        """Operators of the layer's forward pass, in order."""
        return self._of(layer_operators)

    def gradient_operators(self) -> tuple[Operator, ...]:
        """What the layer's backward pass runs besides that of its operators."""
        return self._of(gradient_operators)

    def _of(self, list_operators: Callable[..., tuple[Operator, ...]]) -> tuple[Operator, ...]:
        return list_operators(
            self.model,
            self.layer,
            microbatch_size=self.microbatch_size,
            sequence_length=self.sequence_length,
            tp=self.tp,
            kernels=self.kernels,
        )


class Predictor(Protocol):
    """Regression from samples, or from datasheet figures where there are none."""

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Time of one pass of one layer on this kind of device."""
        ...

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        ...

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """Point-to-point law of a link, right for messages about this large.

        `nodes`: 1 inside a node, more where the link joins nodes.
        """
        ...

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
        """Time of a collective (a `LinkOperation` value) among `group_size` ranks over a link.

        `message_bytes`, `nodes` and `groups` as in `LinkSample`: with as many nodes as ranks each
        sends by its own NIC; with fewer, the ranks of a node carry a ring each, with its part of
        the message. Groups of one cost nothing.
        """
        ...


_OUTSIDE = re.compile(r" [<>] .* measured$")


@lru_cache(maxsize=1024)
def is_extrapolation(note: str) -> bool:
    """Whether a prediction's note says that a size was not measured, as in `hidden 16384 > 8192
    measured`; others tell what it was taken from.
    """
    return _OUTSIDE.search(note) is not None
