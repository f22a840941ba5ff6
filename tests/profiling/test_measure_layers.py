from dataclasses import replace
from functools import partial

import pytest
import torch
from profiling_models import GPT, LLAMA

from hetplan.job.spec import Precision
from hetplan.model.spec import TRAINED_KINDS, LayerKind, ModelSpec
from hetplan.profiling import measure_layers
from hetplan.profiling.backends import CpuBackend, open_backend
from hetplan.profiling.grid import GridPoint, points
from hetplan.profiling.measure_layers import Unit, unit_shapes, unit_work, units
from hetplan.profiling.timing import TimingLimits
from hetplan.profiling.work import Work, measure_all

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


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(measure_layers, "CPU_LIMITS", QUICK)


def measured(point: GridPoint, kind: LayerKind) -> list[dict]:
    unit = Unit(point=point, kind=kind, with_updates=True)
    return list(unit_work(unit, "cpu", CpuBackend()).rows())


@pytest.mark.parametrize("model", [GPT, LLAMA, replace(GPT, vocab_size=61)])
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_every_unit_can_be_measured(model, precision) -> None:
    point = replace(grid(model, tp_degrees=(2,))[0], precision=precision)
    for kind in TRAINED_KINDS:
        rows = measured(point, kind)
        updates = [f"optimizer:{name}" for name in ("adamw", "adamw", "sgd", "sgd")]
        assert [row["phase"] for row in rows] == ["forward", "backward", *updates]
        assert [row["copies"] for row in rows] == [1, 1, 1, 8, 1, 8]
        for row in rows:
            assert row["p10_seconds"] <= row["median_seconds"] <= row["p90_seconds"]
            assert row["repeats"] == 2
            assert (row["layer"], row["tp"], row["hidden_size"]) == (kind, 2, 32)
        assert rows[0]["activation_bytes"] > 0
        assert rows[1]["activation_bytes"] == 0


class Kept:
    """Samples by what they measured, and a clock that moves a second per unit."""

    def __init__(self) -> None:
        self.rows: dict[tuple, dict] = {}
        self.now = 0.0
        self.progress: list[tuple] = []
        self.refused: list[str] = []

    def measure(self, work: list[Work], budget_seconds: float = float("inf")) -> None:
        def timed(each: Work):
            yield from each.rows()
            self.now += 1.0

        measure_all(
            [Work(each.name, each.keys, partial(timed, each)) for each in work],
            lambda keys: tuple(keys.items()) in self.rows,
            lambda row: self.rows.update({self.key(work, row): row}),
            budget_seconds=budget_seconds,
            on_progress=lambda *progress: self.progress.append(progress),
            on_failure=lambda each, error: self.refused.append(f"{each.name}: {error}"),
            clock=lambda: self.now,
        )

    def key(self, work: list[Work], row: dict) -> tuple:
        keys = work[0].keys[0]
        return tuple((name, row[name]) for name in keys)


def test_what_is_missing_is_measured_within_the_budget_and_the_cheapest_first() -> None:
    wanted = units(grid(GPT))
    work = [unit_work(unit, "cpu", CpuBackend()) for unit in wanted]
    kept = Kept()
    kept.measure(work, budget_seconds=0.01)  # too small for anything: the cheapest is measured
    assert [each[3] for each in kept.progress] == [work[0].name]
    kept.measure(work, budget_seconds=3.5)
    assert [each[3] for each in kept.progress[1:]] == [each.name for each in work[1:4]]
    kept.measure(work)
    assert len(kept.progress) == len(work) == 6
    assert kept.progress[-1][:3] == (2, 2, 0.0)
    shapes = {shape for unit in wanted for shape in unit_shapes(unit)}
    assert len(kept.rows) == len(shapes)
    kept.measure(work)
    assert len(kept.progress) == 6
    dropped = next(iter(kept.rows))
    before = kept.rows.copy()
    del kept.rows[dropped]
    kept.measure(work)
    changed = [key for key, row in kept.rows.items() if row is not before[key]]
    assert changed == [dropped]


def test_what_a_device_refuses_is_told_and_passed_over() -> None:
    class Small(CpuBackend):
        def device(self) -> torch.device:
            raise RuntimeError("out of memory")

    work = [unit_work(unit, "cpu", Small()) for unit in units(grid(GPT))[:2]]
    kept = Kept()
    kept.measure(work)
    assert kept.refused == [f"{each.name}: out of memory" for each in work]


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_an_accelerator_measures_all_units() -> None:
    backend = open_backend("cuda")
    for unit in units(grid(GPT)):
        for row in unit_work(unit, backend.kind(), backend).rows():
            assert row["median_seconds"] > 0
            if row["phase"] == "forward":
                assert row["peak_memory_bytes"] > 0
