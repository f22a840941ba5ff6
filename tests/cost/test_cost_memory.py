"""Memory by hand, and how many layers fit against counting up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_fakes import job, model
from memory_cases import FULL, stage_layout

from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.lines import most_units, stage_bytes
from hetplan.cost.memory.values import NO_RECOMPUTE
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layer_units import layer_units
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import Sharding


def use(
    shape: ModelSpec, asked: Job, layers: int, *, memory: float = 64 * 2**30, **changes: object
) -> MemoryUse:
    """Of a stage with so many transformer layers (`memory_cases.stage_layout`)."""
    return device_memory(shape, asked, stage_layout(shape, asked, layers, **changes), memory)


def message(shape: ModelSpec, asked: Job, size: int) -> float:
    """One microbatch's activations between two stages."""
    return size * asked.sequence_length * shape.hidden_size * asked.precision.bytes_per_element


@pytest.mark.parametrize(
    ("target", "precision", "optimizer", "expected"),
    [
        ("native", Precision.FLOAT32, Optimizer.ADAMW, 4 + 4 + 8),
        ("native", Precision.FLOAT32, Optimizer.SGD, 4 + 4),
        ("native", Precision.BFLOAT16, Optimizer.ADAMW, 2 + 2 + 4 + 4 + 8),
        ("native", Precision.BFLOAT16, Optimizer.SGD, 2 + 2 + 4 + 4),
        ("megatron", Precision.FLOAT32, Optimizer.ADAMW, 4 + 4 + 8),
        ("megatron", Precision.BFLOAT16, Optimizer.ADAMW, 18),
        ("megatron", Precision.FLOAT16, Optimizer.SGD, 2 + 4 + 4),
    ],
)
def test_state_per_parameter(
    target: str, precision: Precision, optimizer: Optimizer, expected: int
) -> None:
    asked = job(target=target, precision=precision, optimizer=optimizer)
    found = use(model(), asked, 3)
    state = found.parameter_bytes + found.gradient_bytes + found.optimizer_bytes
    assert state == expected * 3 * model().parameters(LayerKind.TRANSFORMER)


def test_native_receives_into_a_buffer_per_microbatch() -> None:
    few, many = (job(global_batch_size=size) for size in (2 * 10, 2 * 26))
    one_message = message(model(), few, 2)
    for embedding, head, neighbours in ((True, True, 0), (True, False, 1), (False, False, 2)):
        shape = model(num_layers=2) if embedding and head else model()
        one, two = (
            use(shape, asked, 2, microbatch_size=2, embedding=embedding, head=head)
            for asked in (few, many)
        )
        assert two.activation_bytes - one.activation_bytes == neighbours * 16 * one_message
    # What a stage sent it keeps until the gradient comes back, with every microbatch in flight.
    by_layers = [
        [
            use(model(), few, layers, microbatch_size=2, in_flight=count).activation_bytes
            for count in (2, 3)
        ]
        for layers in (1, 2)
    ]
    one_layer, two_layers = (three - two for two, three in by_layers)
    assert two_layers == 2 * (two_layers - one_layer) + one_message


def test_native_adamw_allocates_while_it_updates() -> None:
    # One microbatch of one token: the update outweighs the activations.
    asked = job(sequence_length=1, global_batch_size=1)
    found = use(model(), asked, 4)
    assert found.activation_bytes + found.temporary_bytes == pytest.approx(
        8 * 4 * model().parameters(LayerKind.TRANSFORMER)
    )
    other = use(model(), replace(asked, optimizer=Optimizer.SGD), 4)
    assert other.temporary_bytes < found.temporary_bytes


def test_tied_matrix_counts_once_on_one_stage() -> None:
    tied, untied = model(tied_embeddings=True), model()
    whole = [use(each, job(), 8, embedding=True, head=True) for each in (untied, tied)]
    assert whole[0].parameter_bytes - whole[1].parameter_bytes == 4 * 1000 * 256
    assert use(tied, job(), 8, embedding=True) == use(untied, job(), 8, embedding=True)


@pytest.mark.parametrize("target", ["native", "megatron"])
@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("full_recompute", [False, True])
def test_most_layers_is_counting_up(target: str, dp: int, full_recompute: bool) -> None:
    """What the search takes for the most layers that fit is what device by device fits."""
    shape = model(num_layers=40)
    units = layer_units(shape, 128)
    assert units is not None
    place = {"dp": dp, "recompute": FULL if full_recompute else NO_RECOMPUTE}
    depths = np.array([1, 3, 8])
    seen = set()
    for asked in (job(target=target), job(target=target, sequence_length=4)):
        for role, (embedding, head) in enumerate(((False, False), (True, False), (False, True))):
            # One layer less than the model has: with all of them a stage holds both ends.
            ends = {"embedding": embedding, "head": head}
            totals = [
                [
                    use(shape, asked, count, in_flight=depth, **ends, **place).total_bytes
                    for count in range(1, 40)
                ]
                for depth in depths.tolist()
            ]
            one = stage_layout(shape, asked, 1, **ends, **place)
            lines = stage_bytes(shape, asked, one, units, role).lines(
                Sharding.NONE, 1, 1, one.num_microbatches
            )
            for mebibytes in (1, 5, 20, 60, 150, 250, 400, 600, 2000):
                room = mebibytes * 2**20
                found = most_units(np.array(lines.row()), np.array(float(room)), 39, depths)
                counted = [sum(each <= room for each in row) for row in totals]
                assert found.tolist() == counted
                seen |= set(counted)
    assert {0, 39} < seen
    assert len(seen) > 5
