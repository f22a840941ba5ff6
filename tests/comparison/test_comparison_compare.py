"""Runs beside their plans: what counts, what is off, and what does not belong together."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from compare_cases import run_text, small_result
from hypothesis import given, settings
from hypothesis import strategies as st
from test_launchers_run_log import RANK, RUN
from training_logs_rendered import (
    megatron_arguments,
    megatron_line,
    torchtitan_line,
)

from hetplan.comparison.compare import compare
from hetplan.comparison.logs import load_runs
from hetplan.errors import InputError
from hetplan.launchers.run_log import append_run
from hetplan.search.files import result_text

RESULT = small_result()
STEP = RESULT.estimate.step_seconds


def compared(folder: Path, text: str, result=RESULT, **settings):
    path = folder / "train.log"
    path.write_text(text)
    return compare(path, result, **settings)


def test_a_run_that_took_what_was_predicted(tmp_path: Path) -> None:
    found = compared(tmp_path, run_text(RESULT))
    assert found.measured.median_seconds == pytest.approx(STEP, abs=1e-4)
    assert found.measured.count == 19
    assert [(left.count, left.iterations) for left in found.left_out] == [(1, "10")]
    assert found.inside_interval
    assert abs(found.relative_error) < 1e-3
    assert found.culprit is None
    for row in found.parts:
        assert row.measured_seconds == pytest.approx(row.predicted_seconds, abs=2e-4)
    predicted = {row.timer: row.predicted_most_seconds for row in found.timers}
    measured = {row.timer: row.measured_most_seconds for row in found.timers}
    assert predicted == pytest.approx(measured, abs=2e-5)


PARTS = {
    "forward-compute": "forward passes",
    "backward-compute": "backward passes",
    "wait": "waits in the pipeline",
    "all-grads-sync": "gradient reduction",
    "optimizer": "norm, update and gathering",
    "elsewhere": "rest of the step",
}


@settings(max_examples=40, deadline=None)
@given(where=st.sampled_from(sorted(PARTS)), more=st.floats(0.05, 20.0))
def test_the_part_that_was_made_slower_is_named(
    tmp_path_factory: pytest.TempPathFactory, where: str, more: float
) -> None:
    seconds = more * STEP
    found = compared(tmp_path_factory.mktemp("run"), run_text(RESULT, added={where: seconds}))
    assert found.culprit is not None
    assert found.culprit.part == PARTS[where]
    assert found.culprit.difference_seconds == pytest.approx(seconds, abs=1e-3)
    assert found.culprit.meaning
    assert found.culprit.measure
    # The parts add up on both sides.
    assert sum(row.measured_seconds for row in found.parts) == pytest.approx(
        found.measured.median_seconds
    )
    assert sum(row.predicted_seconds for row in found.parts) == pytest.approx(STEP)


def test_rates_of_torchtitan_are_turned_into_seconds(tmp_path: Path) -> None:
    # 32 sequences of 128 tokens on 8 devices.
    rate = 32 * 128 / 8 / STEP
    scale = 1000  # rates are printed whole; these small ones are not
    slow = replace(RESULT.estimate, tokens_per_second=RESULT.estimate.tokens_per_second * scale)
    result = replace(RESULT, estimate=slow)
    text = "\n".join(torchtitan_line(at, rate * scale) for at in (1, 10, 20, 30)) + "\n"
    found = compared(tmp_path, text, result)
    assert found.measured.median_seconds == pytest.approx(STEP, rel=1e-3)
    assert found.memory is not None
    assert found.memory.kind == "reserved"
    assert found.memory.measured_bytes == pytest.approx(48.91 * 2**30)
    assert any("rates" in note for note in found.notes)


def steps(*seconds: float) -> tuple:
    return tuple(replace(RUN.steps[0], step=at, seconds=s) for at, s in enumerate(seconds))


def ranks_of(result, **changes) -> tuple:
    """The plan's ranks (no tensor parallelism), all alike, as its launch would log them."""
    places = [
        (number, device)
        for number, stage in enumerate(result.plan.pipelines[0].stages)
        for replica in stage.replicas
        for part in replica.devices
        for device in part.devices()
    ]
    return tuple(
        replace(RANK, rank=rank, stage=stage, device=device, **changes)
        for rank, (stage, device) in enumerate(places)
    )


IDLE = replace(RUN.machine, cores=64, load_before=0.1)


def own_log(folder: Path, **changes) -> Path:
    """A run of RESULT's inputs and layout, added to a run log: a slow first step, then 1 s."""
    path = folder / "own.jsonl"
    told = {"model": "small", "cluster": "two", "job": "job", "ranks": ranks_of(RESULT)}
    append_run(path, replace(RUN, **({"machine": IDLE} | told | changes)))
    return path


def test_a_run_of_another_layout_is_another_run_though_its_inputs_are_the_same(
    tmp_path: Path,
) -> None:
    elsewhere = tuple(replace(rank, device=rank.device + 100) for rank in ranks_of(RESULT))
    path = own_log(tmp_path, ranks=elsewhere)
    with pytest.raises(InputError, match=r"none of them of this plan; 1 have its inputs"):
        compare(path, RESULT)
    # The run of the very plan file counts, whatever came after it.
    other = small_result(cut=3, sizes=(8, 8))
    digest = hashlib.sha256(result_text(other).encode()).hexdigest()
    own_log(tmp_path, plan_sha256=digest, steps=steps(9.0, 5.0, 5.0))
    own_log(tmp_path)
    assert compare(path, other).measured.median_seconds == 5.0
    assert not any("another one" in note for note in compare(path, other).notes)
    assert compare(path, RESULT).measured.median_seconds == 1.0
    assert any("another one" in note for note in compare(path, RESULT).notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": ()}, "it has no step"),
        ({"steps": steps(2.0, -1.0, -1.0, -1.0, -1.0)}, "step 3 took -1.0 s and 1 more"),
        ({"ranks": ranks_of(RESULT, busy_seconds=-5.0)}, "rank 0 has busy -5.0 s"),
    ],
)
def test_a_damaged_run_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        compare(own_log(tmp_path, **changes), RESULT)


def test_timers_that_are_no_times_or_longer_than_the_step_are_doubted(tmp_path: Path) -> None:
    text = run_text(RESULT)
    assert not any(
        "are no times" in n or "longer than" in n for n in compared(tmp_path, text).notes
    )
    row = next(line for line in text.split("\n") if "forward-compute" in line)
    before = row[: row.index("(")]
    for bad in ("(-85.00, 88.00)", "(88.00, nan)", "(88.00, 85.00)"):
        found = compared(tmp_path, text.replace(row, before + bad))
        assert any("are no times" in note for note in found.notes), bad
        assert all(each.timer != "forward-compute" for each in found.timers)
    huge = compared(tmp_path, text.replace(row, before + "(1e300, 1e308)"))
    assert any("forward-compute took" in n and "longer than the step" in n for n in huge.notes)
    assert "forward passes" not in [row.part for row in huge.parts]
    assert all(abs(row.difference_seconds) < STEP for row in huge.parts)


def test_hetplans_own_run_log(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    names = {"model": "small", "cluster": "two", "job": "job"}
    names["ranks"] = ranks_of(RESULT, overruns=60)
    append_run(path, replace(RUN, **names))
    with pytest.raises(InputError, match="the load of the machine"):
        compare(path, RESULT)
    names["ranks"] = ranks_of(RESULT)
    append_run(path, replace(RUN, **names))
    append_run(path, replace(RUN, **(names | {"model": "another"})))
    found = compare(path, RESULT)
    assert found.trainer == "native"
    assert found.measured.median_seconds == 1.0
    assert [row.part for row in found.parts][:3] == [
        "passes", "waits in the pipeline", "gradient reduction",
    ]  # fmt: skip
    assert found.parts[0].measured_seconds == 0.7
    other = tmp_path / "other.jsonl"
    append_run(other, RUN)
    with pytest.raises(InputError, match="none of them of this plan"):
        compare(other, RESULT)


def lines_of(times: dict[int, float], **extra) -> str:
    return "\n".join(megatron_line(at, 1e3 * s, batch=32) for at, s in times.items()) + "\n"


def test_slow_steps_are_left_out_unless_they_are_many(tmp_path: Path) -> None:
    times = {at: 1.0 for at in range(1, 41)}
    few = compared(tmp_path, lines_of(times | {17: 9.0}))
    assert any("17" in left.iterations and "over 1.5" in left.reason for left in few.left_out)
    assert few.measured.p90_seconds == 1.0
    many = compared(tmp_path, lines_of(times | {at: 2.0 for at in range(20, 32)}))
    assert many.measured.count == 37
    assert any("two states" in note for note in many.notes)


def test_warm_up_counts_steps_of_every_start(tmp_path: Path) -> None:
    text = lines_of({at: 1.0 for at in range(1, 11)}) + lines_of({at: 1.0 for at in range(6, 16)})
    found = compared(tmp_path, text)
    assert found.left_out[0].iterations == "1, 2, 3, 6, 7, 8"
    assert compared(tmp_path, text, warmup_steps=0).left_out == ()
    with pytest.raises(InputError, match="at least 0"):
        compared(tmp_path, text, warmup_steps=-1)


def test_ramped_batches_are_left_out_and_another_batch_is_another_run(tmp_path: Path) -> None:
    ramp = [megatron_line(at, 500.0, batch=16) for at in range(1, 6)]
    full = [megatron_line(at, 1000.0, batch=32) for at in range(6, 20)]
    found = compared(tmp_path, "\n".join(ramp + full) + "\n")
    assert found.left_out[0].reason == "another global batch"
    assert found.measured.median_seconds == 1.0
    with pytest.raises(InputError, match="global batch of 16, the plan's job 32"):
        compared(tmp_path, "\n".join(ramp) + "\n")


def test_a_log_of_another_layout_is_refused_with_every_difference(tmp_path: Path) -> None:
    head = megatron_arguments(
        world_size=16, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, seq_length=64
    )
    with pytest.raises(InputError) as error:
        compared(tmp_path, head + "\n" + run_text(RESULT))
    text = str(error.value)
    assert "devices 16, the plan 8" in text
    assert "tp 2, the plan 1" in text
    assert "sequence length 64, the plan 128" in text
    assert "pp 2" not in text


def test_a_list_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text(
        "schema: hetplan.runs/1\nruns:\n  - {log: a.log, plan: a.json}\n"
        "  - {log: [b0.log, b1.log], plan: sub/b.json}\n"
    )
    one, two = load_runs(path)
    assert (one.logs, one.plan) == ((tmp_path / "a.log",), tmp_path / "a.json")
    assert two.logs == (tmp_path / "b0.log", tmp_path / "b1.log")
    for text, message in (
        ("schema: hetplan.runs/1\nruns: []\n", "the list is empty"),
        ("schema: hetplan.runs/1\nruns:\n  - {log: ' ', plan: b}\n", r":3: runs\[0\].log: empty"),
        (
            "schema: hetplan.runs/1\nruns:\n  - {log: [a, c], plan: b}\n"
            "  - {log: [./c, x/../a], plan: b}\n",
            r":4: runs\[1\]: the same log and plan as runs\[0\]",
        ),
        ("schema: hetplan.runs/1\nruns:\n  - {logs: a.log, plan: b}\n", "log"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_runs(path)
