"""Synthetic measurements whose truth is known, and where published measurements are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.links import Link, Transport
from hetplan.job.spec import Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict.fit import FittedPredictor, fit
from hetplan.predict.layer.values import LayerColumns, layer_columns
from hetplan.predict.predictor import LayerQuery
from hetplan.profiling.samples import LayerSample, LinkSample, ProfileSet, Provenance

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
HIDDEN = (1024, 2048, 4096, 8192)
Truth = Callable[[LayerColumns], float]

DEVICE = DeviceKind(
    kind="testium-1",
    vendor="test",
    peak_flops_per_second=(("bfloat16", 300e12), ("float32", 20e12)),
    memory_bytes=80e9,
    memory_bandwidth_bytes_per_second=2e12,
    provenance="datasheet",
    source="invented for tests",
)
LINK = Link(
    bandwidth_bytes_per_second=25e9,
    latency_seconds=5e-6,
    transport=Transport.DEVICE_DIRECT,
    samples="rail",
)


def gpt(hidden: int = 2048, architecture: Architecture = Architecture.GPT) -> ModelSpec:
    return plain_model(
        name="test",
        architecture=architecture,
        num_layers=4,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        vocab_size=32000,
        max_sequence_length=4096,
    )


def query(
    model: ModelSpec | int = 2048,
    layer: LayerKind = LayerKind.TRANSFORMER,
    *,
    microbatch: int = 2,
    sequence: int = 2048,
    tp: int = 1,
    precision: Precision = Precision.BFLOAT16,
    kernels: Kernels = DEFAULT_KERNELS,
    backward: bool = False,
) -> LayerQuery:
    """A question about a layer of this model, or of `gpt` of this hidden size."""
    return LayerQuery(
        model=gpt(model) if isinstance(model, int) else model,
        layer=layer,
        microbatch_size=microbatch,
        sequence_length=sequence,
        tp=tp,
        precision=precision,
        kernels=kernels,
        is_backward=backward,
    )


def fitted(samples: Iterable[LayerSample]) -> FittedPredictor:
    """The predictor of these samples alone."""
    return fit(ProfileSet(layers=tuple(samples), links=(), provenance=()))


def truth(columns: LayerColumns) -> float:
    """A device of 200 TFLOP/s, 100 TFLOP/s in attention, 1 TB/s, 50 us per layer."""
    return (
        50e-6
        + columns.matrix_flops / 200e12
        + columns.attention_flops / 100e12
        + columns.elementwise_bytes / 1e12
    )


def layer_sample(
    model: ModelSpec,
    seconds: float,
    *,
    layer: LayerKind = LayerKind.TRANSFORMER,
    phase: str = "forward",
    microbatch: int = 1,
    sequence: int = 2048,
    tp: int = 1,
    precision: Precision = Precision.BFLOAT16,
    device: str = DEVICE.kind,
    steady: bool = True,
) -> LayerSample:
    return LayerSample(
        device=device,
        architecture=model.architecture.value,
        layer=layer.value,
        phase=phase,
        precision=precision.value,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        sequence_length=sequence,
        microbatch_size=microbatch,
        tp=tp,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=10,
        outliers=0,
        steady=steady,
        activation_bytes=0.0,
        peak_memory_bytes=0.0,
        clock_hertz=0.0,
    )


def layer_grid(
    *,
    hidden: Iterable[int] = HIDDEN,
    microbatches: Iterable[int] = (1, 2, 4),
    sequences: Iterable[int] = (1024, 4096),
    tps: Iterable[int] = (1, 2),
    layer: LayerKind = LayerKind.TRANSFORMER,
    phase: str = "forward",
    law: Truth = truth,
    noise: float = 0.0,
    seed: int = 0,
    device: str = DEVICE.kind,
) -> list[LayerSample]:
    """Samples of every combination, with log-normal noise of this standard deviation."""
    source = random.Random(seed)
    samples = []
    for h in hidden:
        for b in microbatches:
            for s in sequences:
                for tp in tps:
                    columns = layer_columns(query(h, layer, microbatch=b, sequence=s, tp=tp))
                    seconds = law(columns) * math.exp(source.gauss(0.0, noise) if noise else 0.0)
                    samples.append(
                        layer_sample(
                            gpt(h),
                            seconds,
                            layer=layer,
                            phase=phase,
                            microbatch=b,
                            sequence=s,
                            tp=tp,
                            device=device,
                        )
                    )
    return samples


def link_sample(
    seconds: float,
    size: int,
    *,
    operation: str = "all_reduce",
    ranks: int = 2,
    link: str = "rail",
    backend: str = "nccl",
    nodes: int = 1,
    groups: int = 1,
) -> LinkSample:
    return LinkSample(
        link=link,
        operation=operation,
        backend=backend,
        group_size=ranks,
        message_bytes=size,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=10,
        outliers=0,
        nodes=nodes,
        groups=groups,
    )


def provenance(
    measured_on: str = "2026-01-01", *, device: str = DEVICE.kind, threads: int = 1
) -> Provenance:
    return Provenance(
        device=device,
        device_name="Testium",
        backend="cpu",
        measured_on=measured_on,
        hetplan_version="0",
        torch_version="2.13.0",
        driver="1.0",
        threads=threads,
        paced="",
        command="hetplan profile",
    )
