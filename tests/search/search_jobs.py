"""Small random jobs on small random clusters, predicted from datasheet figures."""

from __future__ import annotations

from itertools import combinations

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model


def model(layers: int = 6, *, tied: bool = False) -> ModelSpec:
    return plain_model(
        name=f"small-{layers}",
        architecture=Architecture.LLAMA,
        num_layers=layers,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_attention_heads=8,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=4000,
        max_sequence_length=1024,
        tied_embeddings=tied,
    )


def device(kind: str, teraflops: float, gigabytes: float) -> DeviceKind:
    return DeviceKind(
        kind=kind,
        vendor="test",
        peak_flops_per_second=(("bfloat16", teraflops * 1e12),),
        memory_bytes=gigabytes * 1e9,
        memory_bandwidth_bytes_per_second=1e12,
        provenance="datasheet",
        source="made up for a test",
    )


def island(
    name: str,
    *,
    kind: str = "fast",
    teraflops: float = 100.0,
    gigabytes: float = 16.0,
    nodes: int = 2,
    per_node: int = 1,
    gigabytes_per_second: float = 10.0,
) -> Island:
    between = Link(
        bandwidth_bytes_per_second=gigabytes_per_second * 1e9,
        latency_seconds=2e-5,
        transport=Transport.DEVICE_DIRECT,
    )
    return Island(
        name=name,
        region="here",
        device=device(kind, teraflops, gigabytes),
        nodes=nodes,
        devices_per_node=per_node,
        intra_node=Link(
            bandwidth_bytes_per_second=10 * gigabytes_per_second * 1e9,
            latency_seconds=5e-6,
            transport=Transport.DEVICE_DIRECT,
        ),
        inter_node=between,
        memory_bytes=gigabytes * 1e9,
    )


def cluster(*islands: Island, gigabytes_per_second: float = 2.0) -> Cluster:
    link = Link(
        bandwidth_bytes_per_second=gigabytes_per_second * 1e9,
        latency_seconds=1e-4,
        transport=Transport.HOST_STAGED,
    )
    return Cluster(
        name="test",
        islands=islands,
        links=tuple(
            IslandLink(between=(a.name, b.name), link=link) for a, b in combinations(islands, 2)
        ),
    )


def mixed() -> Cluster:
    """Two islands of unlike devices."""
    return cluster(
        island("slow", kind="old", teraflops=40.0, nodes=1, per_node=4),
        island("quick", kind="new", teraflops=120.0, nodes=1, per_node=4),
    )


def job(batch: int = 4, *, target: str = "megatron", gap: float = 0.0) -> Job:
    return Job(
        name="test",
        global_batch_size=batch,
        sequence_length=1024,
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target=target,
        gap=gap,
    )
