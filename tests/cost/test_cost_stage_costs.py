"""Times of a stage and of a boundary by hand, from a predictor with simple laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, job, link, model, two_islands

from hetplan.cluster.spec import Link
from hetplan.cost.stage_costs import (
    StageCosts,
    boundary_costs,
    boundary_costs_over,
    stage_costs,
)
from hetplan.cost.terms import seconds_of
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.build import Degrees


def costs(
    degrees: Degrees,
    *,
    the_model: ModelSpec | None = None,
    the_job: Job | None = None,
    predictor: LinearPredictor | None = None,
) -> StageCosts:
    return stage_costs(
        the_model or model(),
        two_islands().island("a"),
        the_job or job(),
        degrees,
        predictor or LinearPredictor(),
    )


def test_without_tensor_parallelism_only_compute() -> None:
    found = costs(Degrees(tp=1, dp=1, microbatch_size=2))
    assert found.forward_seconds(3, False, False) == pytest.approx(3 * 0.020)
    assert found.forward_seconds(3, True, False) == pytest.approx(3 * 0.020 + 0.002)
    assert found.forward_seconds(3, False, True) == pytest.approx(3 * 0.020 + 0.008)
    assert found.backward_seconds(3, True, True) == pytest.approx(2 * (3 * 0.020 + 0.010))
    assert found.communication_seconds(3, True, True) == 0.0
    assert found.reduction_seconds(3, True, True) == 0.0


def test_tensor_parallel_communication() -> None:
    found = costs(Degrees(tp=4, dp=1, microbatch_size=2))
    # all_reduce of [2, 128, 256] float32 over 4 ranks at 100 GB/s: 2 * 3/4 * bytes / rate.
    one = 1.5 * 2 * 128 * 256 * 4 / 100e9
    softmax = 1.5 * 2 * 128 * 4 / 100e9
    assert found.layer_forward_seconds == pytest.approx(0.020 / 4 + 2 * one)
    assert found.layer_backward_seconds == pytest.approx(0.040 / 4 + 2 * one)
    assert found.embedding_forward_seconds == pytest.approx(0.002 / 4 + one)
    assert found.embedding_backward_seconds == pytest.approx(0.004 / 4)
    assert found.head_forward_seconds == pytest.approx(0.008 / 4 + 3 * softmax)
    assert found.head_backward_seconds == pytest.approx(0.016 / 4 + one)
    assert found.communication_seconds(5, True, True) == pytest.approx(
        5 * 4 * one + 2 * one + 3 * softmax
    )


def test_full_recompute_repeats_the_forward_pass_of_transformer_layers() -> None:
    plain = costs(Degrees(tp=2, dp=1, microbatch_size=1))
    again = costs(Degrees(tp=2, dp=1, microbatch_size=1, full_recompute=True))
    assert again.layer_backward_seconds == pytest.approx(
        plain.layer_backward_seconds + plain.layer_forward_seconds
    )
    assert again.layer_forward_seconds == plain.layer_forward_seconds
    assert again.head_backward_seconds == plain.head_backward_seconds


def test_copies_of_key_value_heads_cost_the_native_trainer_a_sum() -> None:
    degrees = Degrees(tp=4, dp=1, microbatch_size=1)
    shared = model(num_kv_heads=2)
    native = costs(degrees, the_model=shared).layer_backward_seconds
    other = costs(degrees, the_model=shared, the_job=job(target="megatron")).layer_backward_seconds
    message = 2 * (2 * 32) * 256 * 4  # keys and values of both heads
    assert native - other == pytest.approx(1.5 * message / 100e9)


def test_linear_coefficients_are_the_functions() -> None:
    found = costs(Degrees(tp=2, dp=2, microbatch_size=1, full_recompute=True))
    for n in (1, 4, 8):
        for embedding in (False, True):
            for head in (False, True):
                stage = (n, embedding, head)
                assert found.forward_seconds(*stage) == pytest.approx(
                    n * found.layer_forward_seconds
                    + embedding * found.embedding_forward_seconds
                    + head * found.head_forward_seconds
                )
                assert found.backward_seconds(*stage) == pytest.approx(
                    n * found.layer_backward_seconds
                    + embedding * found.embedding_backward_seconds
                    + head * found.head_backward_seconds
                )
                assert found.forward_seconds(*stage) == pytest.approx(
                    seconds_of(found.forward.of(*stage))
                )
                assert found.backward_seconds(*stage) == pytest.approx(
                    seconds_of(found.backward.of(*stage))
                )


def test_reduction_inside_a_node_and_between_nodes() -> None:
    parameters = 3 * model().parameters(LayerKind.TRANSFORMER, 2)
    inside = costs(Degrees(tp=2, dp=2, microbatch_size=1))
    across = costs(Degrees(tp=2, dp=4, microbatch_size=1))
    assert inside.reduction_seconds(3, False, False) == pytest.approx(parameters * 4 / 100e9)
    # Two ranks of a group in each of two nodes: scattered inside, summed between the nodes by both
    # at once, gathered inside.
    assert across.reduction_seconds(3, False, False) == pytest.approx(
        parameters * 4 * (1 / 2 / 100e9 + 1 / 2 / 10e9 + 1 / 2 / 100e9)
    )
    assert inside.optimizer_seconds(3, False, False) == pytest.approx(parameters * 1e-9)
    assert inside.leaving_seconds(3, False, False) == inside.optimizer_seconds(3, False, False)


def test_sharded_optimizer_scatters_gradients_and_gathers_parameters() -> None:
    asked = job(target="megatron", precision=Precision.BFLOAT16)
    found = costs(Degrees(tp=1, dp=4, microbatch_size=1), the_job=asked)
    parameters = 2 * model().parameters(LayerKind.TRANSFORMER)
    assert found.reduction_seconds(2, False, False) == pytest.approx(3 / 4 * parameters * 4 / 100e9)
    # Norm and scaling read the shard's float32 gradients twice and write them once, at 0.73 of the
    # device's 1 TB/s.
    clipping = 3 * 4 * parameters / 4 / (0.73 * 1e12)
    # All float32 gradients of the rank are written, read and written, and read.
    passes = 4 * 4 * parameters / (0.73 * 1e12)
    assert found.optimizer_seconds(2, False, False) == pytest.approx(
        parameters / 4 * 1e-9 + clipping + passes
    )
    gathering = 3 / 4 * parameters * 2 / 100e9
    assert found.leaving_seconds(2, False, False) == pytest.approx(
        found.optimizer_seconds(2, False, False) + gathering
    )
    assert found.after_seconds(2, False, False) == pytest.approx(
        found.reduction_seconds(2, False, False) + found.leaving_seconds(2, False, False)
    )
    # One number, up and down a tree of two levels over the four ranks.
    assert found.norm_seconds == pytest.approx(2 * 2 * (1e-5 + 4 / 100e9))


def test_vocabulary_is_padded_as_the_target_does() -> None:
    degrees = Degrees(tp=2, dp=1, microbatch_size=1)
    native, megatron = costs(degrees), costs(degrees, the_job=job(target="megatron"))
    assert native.memory_model.parameters.embedding == 500 * 256
    assert megatron.memory_model.parameters.embedding == 512 * 256  # 1024 = 4 * (128 * 2)


def test_boundaries() -> None:
    cluster = two_islands()
    shape, asked, predictor = model(), job(), LinearPredictor()
    message = 2 * 128 * 256 * 4

    def between(left: str, right: str, tp: int) -> tuple[float, float, float]:
        found = boundary_costs(
            shape,
            cluster,
            cluster.island(left),
            cluster.island(right),
            asked,
            Degrees(tp=tp, dp=1, microbatch_size=2),
            predictor,
        )
        assert found.send_forward_seconds == found.send_backward_seconds
        assert found.forward_bytes == found.backward_bytes == message
        return (
            found.send_forward_seconds,
            found.wire_latency_seconds,
            found.rendezvous_extra_seconds,
        )

    # Two stages of two devices fit in a node of four, two of four do not.
    assert between("a", "a", 2) == pytest.approx((message / 100e9, 1e-5, 1e-5))
    assert between("a", "a", 4) == pytest.approx((message / 10e9, 1e-5, 1e-5))
    assert between("a", "b", 4) == pytest.approx((message / 1e9, 5e-3, 5e-3))
    assert between("b", "a", 1) == between("a", "b", 1)


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
