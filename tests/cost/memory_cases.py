"""Models, a job and layouts for the tests of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from cost_fakes import job

from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MemoryLayout
from hetplan.job.spec import Job, Precision
from hetplan.model.layers import (
    Experts,
    LayerRun,
)
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    LayerRange,
    Recompute,
    RecomputeGranularity,
)
from hetplan.plans.v_schedules import Pass

GIBIBYTE = 2**30
MEGATRON_JOB = job(
    target="megatron", precision=Precision.BFLOAT16, sequence_length=512, global_batch_size=64
)
FULL = Recompute(granularity=RecomputeGranularity.FULL)
LLAMA = plain_model(
    name="llama",
    architecture=Architecture.LLAMA,
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=688,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=2048,
    max_sequence_length=512,
)
DENSE = LLAMA.layer_runs[0].layer
SPARSE = replace(
    DENSE,
    mlp=Experts(
        num_experts=8, experts_per_token=2, expert_ffn_hidden_size=96, shared_ffn_hidden_size=64
    ),
)
MIXED = replace(
    LLAMA,
    name="mixed",
    layer_runs=(LayerRun(count=2, layer=DENSE), LayerRun(count=6, layer=SPARSE)),
)


def layout(start: int = 1, stop: int = 5, **changes: object) -> MemoryLayout:
    asked: dict[str, object] = {
        "chunks": (LayerRange(start=start, stop=stop),),
        "num_microbatches": 8,
        "num_stages": 4,
        "stage": 1,
    }
    degrees: dict[str, object] = {"tp": 1, "dp": 1, "microbatch_size": 2}
    names = {field.name for field in fields(Shape)}
    degrees |= {name: value for name, value in changes.items() if name in names}
    asked |= {name: value for name, value in changes.items() if name not in names}
    return MemoryLayout(shape=Shape(**degrees), **asked)  # type: ignore[arg-type]


def use_of(
    asked: MemoryLayout, the_model: ModelSpec = LLAMA, the_job: Job = MEGATRON_JOB
) -> MemoryUse:
    return device_memory(the_model, the_job, asked, 80 * GIBIBYTE)


def state_of(use: MemoryUse) -> float:
    return use.parameter_bytes + use.gradient_bytes + use.optimizer_bytes


def kept(asked: MemoryLayout, the_model: ModelSpec = LLAMA, the_job: Job = MEGATRON_JOB) -> float:
    return use_of(asked, the_model, the_job).activation_bytes


def one_layer(**changes: object) -> MemoryLayout:
    return layout(1, 2, num_stages=1, stage=0, **changes)


def stage_layout(
    shape: ModelSpec,
    asked: Job,
    layers: int,
    *,
    embedding: bool = False,
    head: bool = False,
    in_flight: int = 1,
    **changes: object,
) -> MemoryLayout:
    """A stage with so many transformer layers, beside the embedding, the head or neither."""
    first = 0 if embedding else shape.num_layers + 1 - layers if head else 1
    found = layout(
        first,
        first + embedding + layers + head,
        num_stages=1,
        stage=0,
        warmup=(in_flight,),
        **({"microbatch_size": 1} | changes),
    )
    count = max(1, asked.global_batch_size // found.shape.samples)
    return replace(found, num_microbatches=count)


def peak_kept_bytes(
    order: Sequence[Pass], kept: Sequence[float], kept_for_weights: Sequence[float]
) -> float:
    """Most bytes that the passes of this order keep at once.

    kept[c] is what one microbatch keeps in chunk c from the start of F to the end of B,
    kept_for_weights[c] what it still keeps from then to the end of W (no part of it without W
    passes): M_B and M_W of arXiv 2401.10241, table 1.
    """
    splits = any(one.kind == "W" for one in order)
    now = peak = 0.0
    for one in order:
        if one.kind == "F":
            now += kept[one.chunk]
        elif one.kind != "W":
            later = splits and one.kind == "B"
            now -= kept[one.chunk] - (kept_for_weights[one.chunk] if later else 0.0)
        else:
            now -= kept_for_weights[one.chunk]
        peak = max(peak, now)
    return peak
