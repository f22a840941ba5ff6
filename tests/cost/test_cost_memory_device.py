"""Memory of one device of any stage: state, schedules, buffers, and the search's own function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import job, model
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cases import (
    DENSE,
    FULL,
    LLAMA,
    MEGATRON_JOB,
    layout,
    peak_kept_bytes,
    stage_layout,
    state_of,
    use_of,
)

from hetplan.cost.memory.device import Chunk, device_memory, worst_moment
from hetplan.cost.memory.lines import stage_bytes
from hetplan.cost.memory.values import NATIVE, NO_RECOMPUTE, trainer_memory
from hetplan.cost.schedules import passes
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.layer_units import layer_units
from hetplan.model.spec import Architecture
from hetplan.plans.plan import (
    Recompute,
    Sharding,
)

# ---- the search asks the same formulas


@given(
    target=st.sampled_from(["native", "megatron"]),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from(Optimizer),
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    size=st.integers(1, 3),
    full=st.booleans(),
    tied=st.booleans(),
    llama=st.booleans(),
    ends=st.tuples(st.booleans(), st.booleans()),
    layers=st.integers(1, 8),
    depth=st.integers(1, 9),
    sequence=st.sampled_from([1, 16, 512]),
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_search_and_the_estimate_agree(
    target, precision, optimizer, tp, dp, size, full, tied, llama, ends, layers, depth, sequence
) -> None:
    gpt = model(architecture=Architecture.GPT, num_kv_heads=8)
    shape = replace(LLAMA if llama else gpt, tied_embeddings=tied)
    asked = job(
        target=target,
        precision=precision,
        optimizer=optimizer,
        sequence_length=sequence,
        global_batch_size=48,
    )
    shards = dp if target == "megatron" else 1
    embedding, head = ends
    if embedding and head:
        layers = shape.num_layers
    place = stage_layout(
        shape, asked, layers, embedding=embedding, head=head, in_flight=depth, tp=tp, dp=dp,
        etp=tp, microbatch_size=size, recompute=FULL if full else NO_RECOMPUTE,
        sharding=Sharding.OPTIMIZER if shards > 1 else Sharding.NONE, shards=shards,
    )  # fmt: skip
    units = layer_units(shape, sequence)
    assert units is not None
    held = stage_bytes(shape, asked, place, units, embedding + 2 * head)
    lines = held.lines(place.sharding, shards, shards, place.num_microbatches)
    one = device_memory(shape, asked, place, 1e9)
    assert one.total_bytes == pytest.approx(lines.total_bytes(layers, place.in_flight), rel=1e-12)


# ---- state


@pytest.mark.parametrize(
    ("sharding", "each"),
    [
        # parameters, gradients, AdamW with its float32 copy: arXiv 1910.02054, figure 1.
        (Sharding.NONE, 2 + 4 + 12),
        (Sharding.OPTIMIZER, 2 + 4 + 12 / 4),
        (Sharding.GRADIENTS, 2 + 4 / 4 + 12 / 4),
        (Sharding.PARAMETERS, 2 / 4 + 4 / 4 + 12 / 4),
    ],
)
def test_zero_levels(sharding: Sharding, each: float) -> None:
    plain = use_of(layout())
    use = use_of(layout(sharding=sharding, shards=4, dp=8))
    count = plain.parameter_bytes / 2
    assert count == 4 * DENSE.parameters(256)
    assert state_of(use) == pytest.approx(each * count)
    # What is cut is whole while a layer runs: its gradients; its parameters and the next layer's.
    layer = DENSE.parameters(256)
    extra = {Sharding.GRADIENTS: 4 * layer, Sharding.PARAMETERS: (4 + 2 * 2) * layer}
    assert use.temporary_bytes - plain.temporary_bytes == pytest.approx(extra.get(sharding, 0.0))


# ---- schedules


@given(
    data=st.data(),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]),
    num_stages=st.integers(1, 5),
    m=st.integers(1, 9),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_the_worst_moment_is_at_least_what_is_kept(data, schedule, num_stages, m) -> None:
    virtual = data.draw(st.integers(1, 3)) if schedule == "interleaved-1f1b" else 1
    stage = data.draw(st.integers(0, num_stages - 1))
    order = passes(
        schedule,
        stage=stage,
        num_stages=num_stages,
        num_microbatches=m,
        virtual_stages=virtual,
    )
    size = st.integers(1, 9)
    kept_, work = ([data.draw(size) for _ in range(virtual)] for _ in range(2))
    later = [data.draw(st.integers(0, each)) for each in kept_]
    chunks = tuple(
        Chunk(kept=float(a), for_weights=float(b), working=0.0)
        for a, b in zip(kept_, later, strict=True)
    )
    assert sum(worst_moment(order, chunks)) == peak_kept_bytes(order, kept_, later)
    busy = tuple(
        replace(chunk, working=float(more)) for chunk, more in zip(chunks, work, strict=True)
    )
    least, most = sum(worst_moment(order, chunks)), sum(worst_moment(order, busy))
    assert least + min(work) <= most <= least + max(work) or most == least


# ---- buffers and the rest


def test_reserved_is_told_apart_from_allocated() -> None:
    use = device_memory(LLAMA, MEGATRON_JOB, layout(), 1e9)
    assert use.reserved_bytes == pytest.approx(1.04 * use.total_bytes)
    counted = replace(use, reserve_factor=1.5, runtime_bytes=2.0**30)
    assert counted.reserved_bytes == 1.5 * use.total_bytes + 2**30
    assert use.available_bytes == pytest.approx(0.9e9)


grows = st.sampled_from(["microbatch_size", "num_microbatches", "stop"])


@given(
    what=grows,
    tp=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    recompute=st.sampled_from([Recompute(), FULL]),
    target=st.sampled_from(["native", "megatron"]),
    stop=st.integers(2, 8),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_more_needs_more(what, tp, schedule, recompute, target, stop) -> None:
    asked = replace(MEGATRON_JOB, target=target)
    counts = {"stop": stop, "num_microbatches": 8, "microbatch_size": 2}
    more = counts | {what: counts[what] + 1}
    small, large = (
        layout(tp=tp, schedule=schedule, recompute=recompute, **each) for each in (counts, more)
    )
    one, two = (use_of(each, LLAMA, asked).total_bytes for each in (small, large))
    assert one <= two


def test_wrong_layouts_are_refused() -> None:
    for changes, said in (
        ({"tp": 0}, "begin at 1"),
        ({"warmup": (1, 1)}, "2 warm-up depths for 4 stages"),
    ):
        with pytest.raises(InputError, match=said):
            layout(**changes)
    with pytest.raises(InputError, match="has layers 0 to 10"):
        use_of(layout(1, 11))
    with pytest.raises(InputError, match="unknown target"):
        trainer_memory("nothing")
    assert trainer_memory("native") is NATIVE
