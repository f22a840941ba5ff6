"""Inputs and a predictor with simple laws, so that every expected number can be done by hand."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict.link.prior import LINK_LOG_HALFWIDTH
from hetplan.predict.link.shapes import lane_bytes, ring_shape
from hetplan.predict.predictor import LayerQuery, Prediction, SendLaw


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPredictor:
    """Every time proportional to its natural size; fixed seconds per layer kind and device."""

    layer_seconds: tuple[tuple[LayerKind, float], ...] = (
        (LayerKind.EMBEDDING, 0.001),
        (LayerKind.TRANSFORMER, 0.010),
        (LayerKind.HEAD, 0.004),
    )
    slow: tuple[tuple[str, float], ...] = ()
    """(device kind, factor)."""
    halfwidth: float = 0.0
    source: str = "measured"
    extrapolating: tuple[str, ...] = ()
    collective_fixed_seconds: float = 0.0
    update_seconds: float = 1e-9
    """Of one parameter."""

    def _prediction(self, seconds: float) -> Prediction:
        return Prediction(
            seconds=seconds,
            log_halfwidth=self.halfwidth,
            source=self.source,
            extrapolating=self.extrapolating,
        )

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        factor = dict(self.slow).get(device.kind, 1.0) * (2 if query.is_backward else 1)
        seconds = dict(self.layer_seconds)[query.layer]
        return self._prediction(seconds * factor * query.microbatch_size / query.tp)

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        return self._prediction(parameters * self.update_seconds)

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        return SendLaw(
            rendezvous_latency_seconds=2 * link.latency_seconds,
            wire_latency_seconds=link.latency_seconds,
            seconds_per_byte=1 / link.bandwidth_bytes_per_second,
            log_halfwidth=self.halfwidth,
            source=self.source,
            extrapolating=self.extrapolating,
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
        if group_size == 1:
            return self._prediction(0.0)
        factor = 2.0 if operation == "all_reduce" else 1.0
        share = (group_size - 1) / group_size
        message_bytes = lane_bytes(operation, group_size, nodes, message_bytes)
        return self._prediction(
            self.collective_fixed_seconds
            + factor * share * message_bytes / link.bandwidth_bytes_per_second
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(LinearPredictor):
    """Links by latency and goodput, in every step of an algorithm, whatever their transport."""

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        return SendLaw(
            rendezvous_latency_seconds=2 * link.latency_seconds,
            wire_latency_seconds=link.latency_seconds,
            seconds_per_byte=1 / link.goodput_bytes_per_second,
            log_halfwidth=LINK_LOG_HALFWIDTH,
            source="datasheet",
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
        steps, share = ring_shape(operation, group_size)
        lane = lane_bytes(operation, group_size, nodes, message_bytes)
        step = link.latency_seconds + share * lane / link.goodput_bytes_per_second
        return Prediction(
            seconds=steps * step, log_halfwidth=LINK_LOG_HALFWIDTH, source="datasheet"
        )


def link(bandwidth: float, latency: float = 1e-5, *, staged: bool = False) -> Link:
    return Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency,
        transport=Transport.HOST_STAGED if staged else Transport.DEVICE_DIRECT,
    )


def island(
    name: str,
    device: str = "fast",
    *,
    nodes: int = 2,
    devices_per_node: int = 4,
    memory: float = 64 * 2**30,
) -> Island:
    return Island(
        name=name,
        region="here",
        device=DeviceKind(
            kind=device,
            vendor="nobody",
            peak_flops_per_second=(("float32", 1e12),),
            memory_bytes=memory,
            memory_bandwidth_bytes_per_second=1e12,
            provenance="datasheet",
            source="invented for a test",
        ),
        nodes=nodes,
        devices_per_node=devices_per_node,
        intra_node=link(100e9),
        inter_node=link(10e9),
        memory_bytes=memory,
    )


def two_islands() -> Cluster:
    return Cluster(
        name="two",
        islands=(island("a"), island("b", "slow")),
        links=(IslandLink(between=("a", "b"), link=link(1e9, 5e-3, staged=True)),),
    )


def model(**changes: object) -> ModelSpec:
    shape: dict[str, object] = {
        "name": "small",
        "architecture": Architecture.LLAMA,
        "num_layers": 8,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
        "vocab_size": 1000,
        "max_sequence_length": 128,
    }
    return plain_model(**(shape | changes))  # type: ignore[arg-type]


def job(**changes: object) -> Job:
    asked: dict[str, object] = {
        "name": "job",
        "global_batch_size": 32,
        "sequence_length": 128,
        "precision": Precision.FLOAT32,
        "optimizer": Optimizer.ADAMW,
        "target": "native",
    }
    return Job(**(asked | changes))  # type: ignore[arg-type]
