from dataclasses import replace

import pytest
import torch
from profiling_models import GPT, LLAMA

from hetplan.job.spec import Precision
from hetplan.model.spec import TRAINED_KINDS, LayerKind, ModelSpec
from hetplan.profiling.backends import CpuBackend, open_backend
from hetplan.profiling.grid import GridPoint, points
from hetplan.profiling.measure_layers import (
    LayerProfiler,
    Unit,
    has_pace,
    units,
)
from hetplan.profiling.pacing import PacedKind, PaceEntry, Pacer
from hetplan.profiling.timing import TimingLimits

QUICK = TimingLimits(
    window_passes=1,
    tolerance=1.0,
    warmup_min_seconds=0.0,
    warmup_max_seconds=0.1,
    min_repeats=2,
    max_repeats=4,
    min_seconds=0.0,
    max_seconds=30.0,
)


def grid(*models: ModelSpec, microbatch_sizes=(1, 2), tp_degrees=(1,)):
    return points(
        models,
        sequence_lengths=(16,),
        microbatch_sizes=microbatch_sizes,
        tp_degrees=tp_degrees,
        precisions=(Precision.FLOAT32,),
    )


def profiler(**changes) -> LayerProfiler:
    arguments = {"device": "cpu", "limits": QUICK} | changes
    return LayerProfiler(CpuBackend(), **arguments)


def measured(point: GridPoint, kind: LayerKind):
    return profiler().measure_unit(Unit(point=point, kind=kind, with_updates=True))


@pytest.mark.parametrize("model", [GPT, LLAMA, replace(GPT, vocab_size=61)])
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_every_unit_can_be_measured(model, precision) -> None:
    point = replace(grid(model, tp_degrees=(2,))[0], precision=precision)
    for kind in TRAINED_KINDS:
        samples = measured(point, kind)
        assert [sample.phase for sample in samples] == [
            "forward",
            "backward",
            *("optimizer:adamw",) * 2,
            *("optimizer:sgd",) * 2,
        ]
        assert [sample.copies for sample in samples] == [1, 1, 1, 8, 1, 8]
        for sample in samples:
            assert sample.p10_seconds <= sample.median_seconds <= sample.p90_seconds
            assert sample.repeats == 2
            assert (sample.layer, sample.tp, sample.hidden_size) == (kind, 2, 32)
        assert samples[0].activation_bytes > 0
        assert samples[1].activation_bytes == 0


def test_activation_bytes_are_those_autograd_keeps() -> None:
    point = grid(GPT, microbatch_sizes=(2,))[0]
    b, s, h = 2, 16, GPT.hidden_size
    tokens = b * s
    (embedding, *_) = measured(point, LayerKind.EMBEDDING)
    assert embedding.activation_bytes == tokens * 8  # int64 token numbers
    (layer, *_) = measured(point, LayerKind.TRANSFORMER)
    # Inputs and outputs of two norms, q, k, v together, context, up and its GELU; and small
    # ones: mean and deviation of two norms, the attention's row sums (per head).
    large = tokens * (4 * h + 3 * h + h + 2 * GPT.ffn_hidden_size)
    small = tokens * (4 + GPT.num_attention_heads)
    assert layer.activation_bytes == 4 * (large + small)
    (head, *_) = measured(point, LayerKind.HEAD)
    # Input and output of the norm, its mean and deviation, the softmax; the target's place
    # (int64) and whether it is here (bool). The logits themselves are not kept.
    assert head.activation_bytes == 4 * tokens * (2 * h + 2 + GPT.vocab_size) + 9 * tokens


def test_updates_are_measured_once_per_shape() -> None:
    work = units(grid(GPT, microbatch_sizes=(4, 2), tp_degrees=(1, 2)))
    assert [unit.point.microbatch_size for unit in work if unit.with_updates] == [2, 2]
    assert {unit.kind for unit in work if unit.with_updates} == {LayerKind.TRANSFORMER}
    costs = [unit.point.flops(unit.kind) for unit in work]
    assert costs == sorted(costs)


def test_a_second_run_measures_what_is_missing() -> None:
    work = units(grid(GPT))
    measurer = profiler()
    first = [progress.samples for progress in measurer.run(work)]
    assert len(first) == len(work) == 6
    keys = {sample.shape for samples in first for sample in samples}
    assert keys == {key for unit in work for key in measurer.shapes(unit)}
    assert list(measurer.run(work, measured=keys)) == []
    dropped = first[2][1].shape
    (again,) = measurer.run(work, measured=keys - {dropped})
    assert dropped in {sample.shape for sample in again.samples}
    assert (again.finished, again.total, again.left_seconds) == (1, 1, 0.0)


def test_the_budget_is_kept_and_the_cheapest_come_first() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    measurer = profiler(clock=clock)
    plain = measurer.measure_unit

    def slow(unit: Unit):
        samples = plain(unit)
        clock.now += 1.0
        return samples

    measurer.measure_unit = slow
    work = units(grid(GPT))
    done = list(measurer.run(work, budget_seconds=3.5))
    assert 1 <= len(done) <= 3
    assert [progress.unit for progress in done] == list(work[: len(done)])
    assert done[0].left_seconds <= 3.5
    # A budget that is too small for anything still measures the cheapest unit.
    assert len(list(measurer.run(work, budget_seconds=0.01))) == 1


def test_a_paced_layer_measures_its_nominal_time() -> None:
    kind = PacedKind(
        device="slow",
        slow_down=3.0,
        entries=tuple(
            PaceEntry(layer="transformer", phase=phase, microbatch_size=1, tp=1, seconds=seconds)
            for phase, seconds in (("forward", 0.02), ("backward", 0.04))
        ),
    )
    small, large = (Unit(point=point, kind=LayerKind.TRANSFORMER) for point in grid(GPT))
    assert has_pace(kind, small)
    assert not has_pace(kind, large)
    pacer = Pacer(kind)
    forward, backward = profiler(pacer=pacer, device="slow").measure_unit(small)
    # At most half of a pass is paid back for sleeping too long; unpaced it takes a millisecond.
    assert forward.median_seconds >= 0.01
    assert backward.median_seconds >= 0.02
    assert pacer.passes >= 6
    assert forward.device == "slow"


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_an_accelerator_measures_all_units() -> None:
    backend = open_backend("cuda")
    measurer = LayerProfiler(backend, device=backend.kind(), limits=QUICK)
    for progress in measurer.run(units(grid(GPT))):
        for sample in progress.samples:
            assert sample.median_seconds > 0
            if sample.phase == "forward":
                assert sample.peak_memory_bytes > 0
