"""Times of a stage and of a boundary by hand, from a predictor with simple laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, job, link, model
from estimate_plans import plan_with, stages_of, wide_cluster

from hetplan.cluster.spec import Link
from hetplan.cost.step_model.hops import Hop, boundary_costs_over, hop_between
from hetplan.cost.step_model.plan import StageWork
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.cost.step_model.step import StageEnd
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.plan import Plan, Recompute, RecomputeGranularity, Sharding

CLUSTER = wide_cluster()
FULL = Recompute(granularity=RecomputeGranularity.FULL)
EMBEDDING, TRANSFORMER, HEAD = 0.001, 0.010, 0.004  # seconds forward of one sequence


def plan_of(
    asked: Job, layers: Sequence[int], *, tp: int = 1, dp: int = 1, shards: int = 1,
    recompute: Recompute | None = None, microbatch_size: int = 1, shape: ModelSpec | None = None,
) -> Plan:  # fmt: skip
    """Stages on neighbouring devices with so many transformer layers each."""
    shape = shape or model()
    starts = [0, *(1 + sum(layers[:at]) for at in range(1, len(layers)))]
    stages = stages_of(
        [starts], [tp * dp] * len(layers), len(shape.layers), num_microbatches=4,
        recompute=recompute, tp=tp, microbatch_size=microbatch_size,
    )  # fmt: skip
    return plan_with(
        shape, CLUSTER, asked, [(stages, 4)], shards=shards,
        sharding=Sharding.OPTIMIZER if shards > 1 else Sharding.NONE,
    )  # fmt: skip


def step_of(
    layers: Sequence[int], *, asked: Job | None = None, shape: ModelSpec | None = None,
    **how: object,
) -> StepCost:  # fmt: skip
    asked = asked or job()
    plan = plan_of(asked, layers, shape=shape, **how)  # type: ignore[arg-type]
    return Pricer(shape or model(), CLUSTER, asked, LinearPredictor()).step(plan)


def stages(layers: Sequence[int], **how: object) -> list[StageWork]:
    """Of one pipeline on island a."""
    return step_of(layers, **how).work[0].stages  # type: ignore[arg-type]


def ends(layers: Sequence[int], **how: object) -> Sequence[StageEnd]:
    return step_of(layers, **how).composed.stages[0]  # type: ignore[arg-type]


def passes(stage: StageWork) -> tuple[float, float]:
    """Forward and backward pass of the stage's only chunk."""
    return stage.forward[0], stage.backward[0]


def test_without_tensor_parallelism_only_compute() -> None:
    first, middle, last = stages((3, 3, 2), microbatch_size=2)
    for stage, layers, rest in ((first, 3, 0.002), (middle, 3, 0.0), (last, 2, 0.008)):
        forward = layers * 0.020 + rest
        assert passes(stage) == pytest.approx((forward, 2 * forward))
    (whole,) = stages((8,), microbatch_size=2)
    assert passes(whole) == pytest.approx((0.170, 0.340))
    assert all(each.reduction.communication_seconds == 0 for each in ends((3, 3, 2)))


def test_tensor_parallel_communication() -> None:
    first, middle, last = stages((2, 3, 3), microbatch_size=2, tp=4)
    # all_reduce of [2, 128, 256] float32 over 4 ranks at 100 GB/s: 2 * 3/4 * bytes / rate.
    one = 1.5 * 2 * 128 * 256 * 4 / 100e9
    softmax = 1.5 * 2 * 128 * 4 / 100e9
    layer = (0.020 / 4 + 2 * one, 0.040 / 4 + 2 * one)
    assert passes(middle) == pytest.approx([3 * each for each in layer])
    embedding = (0.002 / 4 + one, 0.004 / 4)
    assert passes(first) == pytest.approx(
        [2 * each + rest for each, rest in zip(layer, embedding, strict=True)]
    )
    head = (0.008 / 4 + 3 * softmax, 0.016 / 4 + one)
    assert passes(last) == pytest.approx(
        [3 * each + rest for each, rest in zip(layer, head, strict=True)]
    )


def test_full_recompute_repeats_the_forward_pass_of_transformer_layers() -> None:
    plain = stages((3, 3, 2), tp=2)
    again = stages((3, 3, 2), tp=2, recompute=FULL)
    layer = passes(plain[1])[0] / 3
    for before, after, layers in zip(plain, again, (3, 3, 2), strict=True):
        assert after.forward == before.forward
        assert after.backward[0] == pytest.approx(before.backward[0] + layers * layer)


def test_copies_of_key_value_heads_cost_the_native_trainer_a_sum() -> None:
    shared = model(num_kv_heads=2)
    native, other = (
        stages((3, 3, 2), tp=4, shape=shared, asked=job(target=target))[1]
        for target in ("native", "megatron")
    )
    message = 2 * (2 * 32) * 256 * 4  # keys and values of both heads
    assert native.backward[0] - other.backward[0] == pytest.approx(3 * 1.5 * message / 100e9)


def test_reduction_inside_a_node_and_between_nodes() -> None:
    parameters = 3 * model().parameters(LayerKind.TRANSFORMER, 2)
    inside, across = (ends((3, 3, 2), tp=2, dp=dp)[1] for dp in (2, 4))
    reduction = inside.reduction.communication_seconds
    assert reduction == pytest.approx(parameters * 4 / 100e9)
    # Two ranks of a group in each of two nodes: scattered inside, summed between the nodes by both
    # at once, gathered inside.
    assert across.reduction.communication_seconds == pytest.approx(
        parameters * 4 * (1 / 2 / 100e9 + 1 / 2 / 10e9 + 1 / 2 / 100e9)
    )
    assert inside.update == pytest.approx(parameters * 1e-9)
    assert inside.leaves == inside.update


def test_sharded_optimizer_scatters_gradients_and_gathers_parameters() -> None:
    asked = job(target="megatron", precision=Precision.BFLOAT16, gradient_clipping=True)
    step = step_of((3, 2, 3), dp=4, shards=4, asked=asked)
    found = step.composed.stages[0][1]
    parameters = 2 * model().parameters(LayerKind.TRANSFORMER)
    reduction = found.reduction.communication_seconds
    assert reduction == pytest.approx(3 / 4 * parameters * 4 / 100e9)
    # Norm and scaling read the shard's float32 gradients twice and write them once, at 0.73 of the
    # device's 1 TB/s.
    clipping = 3 * 4 * parameters / 4 / (0.73 * 1e12)
    # All float32 gradients of the rank are written, read and written, and read.
    writing = 4 * 4 * parameters / (0.73 * 1e12)
    assert found.update == pytest.approx(parameters / 4 * 1e-9 + clipping + writing)
    gathering = 3 / 4 * parameters * 2 / 100e9
    assert found.leaves == pytest.approx(found.update + gathering)
    # One number, up and down a tree of two levels over the four ranks of a node, and one of two
    # levels over the stages, between nodes.
    inside, between = 1e-5 + 4 / 100e9, 1e-5 + 4 / 10e9
    assert step.composed.norm_seconds == pytest.approx(2 * 2 * inside + 2 * 2 * between)


def test_vocabulary_is_padded_as_the_target_does() -> None:
    native, megatron = (
        stages((8,), tp=2, asked=job(target=target))[0] for target in ("native", "megatron")
    )
    # Embedding and head; 1024 = 4 * (128 * 2).
    assert megatron.parameters - native.parameters == 2 * (512 - 500) * 256


def hop_of(tp: int, first_device: int) -> Hop:
    """From the first devices of island a to as many from `first_device` on."""
    made = [
        stages_of([[at]], [tp], 10, first_device=at_device, num_microbatches=4, tp=tp,
                  microbatch_size=2)[0]
        for at, at_device in ((0, 0), (5, first_device))
    ]  # fmt: skip
    ends = made[0].replicas, made[1].replicas
    return hop_between(CLUSTER, model(), job(), *ends, LinearPredictor())


def test_boundaries() -> None:
    message = 2 * 128 * 256 * 4

    def between(tp: int, first_device: int) -> tuple[float, float, float]:
        found = hop_of(tp, first_device)
        assert found.send_forward_seconds == found.send_backward_seconds
        assert found.forward_bytes == found.backward_bytes == message
        return (
            found.send_forward_seconds,
            found.wire_latency_seconds,
            found.rendezvous_extra_seconds,
        )

    # Two stages of two devices fit in a node of four, two of four do not.
    assert between(2, 2) == pytest.approx((message / 100e9, 1e-5, 1e-5))
    assert between(4, 4) == pytest.approx((message / 10e9, 1e-5, 1e-5))
    assert between(4, CLUSTER.first_device("b")) == pytest.approx((message / 1e9, 5e-3, 5e-3))


def test_devices_of_a_stage_share_the_capacity_of_a_link() -> None:
    shape, asked, predictor = model(), job(), LinearPredictor()
    leased = replace(link(4e9), shared_bandwidth_bytes_per_second=6e9)

    def seconds(over: Link, tp: int, dp: int) -> float:
        degrees = Degrees(tp=tp, dp=dp, microbatch_size=2)
        return boundary_costs_over(over, shape, asked, degrees, predictor).send_forward_seconds

    message = 2 * 128 * 256 * 4
    assert seconds(leased, 1, 1) == pytest.approx(message / 4e9)
    assert seconds(leased, 2, 1) == pytest.approx(message / 3e9)
    assert seconds(leased, 2, 2) == pytest.approx(message / 1.5e9)
    assert seconds(link(4e9), 2, 2) == pytest.approx(message / 4e9)
