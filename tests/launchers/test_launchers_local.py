"""Plans are trained for real, watched, and refused where this machine cannot run them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import elastic_cases
import pytest
from launch_results import result_of
from runtime_cases import (
    CPUS,
    GPT,
    LLAMA,
    cluster,
    island,
    job,
    plan_of,
)

from hetplan.cli.launch import run as launch_file
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.launchers import local, local_loop, ranks
from hetplan.launchers.local import LaunchSettings, launch, torch_backend
from hetplan.launchers.ranks import OnStep
from hetplan.launchers.run_log import RunLog, read_runs
from hetplan.launchers.watching import SILENT_SECONDS, FaultKind, RunFailed, RunFault
from hetplan.runtime.checkpoints import checkpoints_in, step_folder
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.single import reference_losses
from hetplan.runtime.training import CheckpointRequest
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import SearchResult


def cpu_result(**changes: object) -> SearchResult:
    plan = plan_of(GPT, job(), (2, 2), microbatch_size=2)
    return result_of(GPT, CPUS, job(), plan, **changes)


def workers() -> list[int]:
    """Worker processes of this process that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "hetplan.launchers.worker" in words and words[-2] == str(os.getpid()):
            found.append(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files, to see what is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run_folders(temporary: Path) -> list[Path]:
    """Folders of runs; torch makes some of its own."""
    return list(temporary.glob("hetplan-run-*"))


def test_a_pace_without_the_plans_microbatch_is_refused_before_the_start(temporary: Path) -> None:
    # It has times of up to eight samples.
    pace = elastic_cases.pace()
    machines = cluster(island("a", "emulated-fast", 2), island("b", "emulated-slow", 2))
    plan = plan_of(GPT, job(32), (3, 1), machines, "ab", microbatch_size=16)
    with pytest.raises(InputError) as refused:
        launch(result_of(GPT, machines, job(32), plan), LaunchSettings(steps=2, pace=pace))
    text = str(refused.value)
    wanted = "kind emulated-{} has no {} time for layer {}, microbatch_size 16, tp 1"
    assert wanted.format("fast", "forward", "embedding") in text
    assert wanted.format("slow", "backward", "head") in text
    assert wanted.format("fast", "forward", "head") not in text
    assert "--microbatch" in text
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, 1e12])
def test_limits_that_no_clock_can_hold_are_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="timeout is"):
        launch(cpu_result(), LaunchSettings(steps=2, timeout_seconds=seconds))


def test_ranks_are_started_watched_and_their_report_is_a_run(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks that train nothing; those that do are the next test's."""
    faulty(monkeypatch, "pretend:0:3")
    told: list[StepRecord] = []
    run = launch(cpu_result(), LaunchSettings(steps=3), on_step=told.append)
    assert [step.loss for step in run.steps] == [step.loss for step in told] == [4.0, 3.0, 2.0]
    assert (run.median_step_seconds, run.warmup_steps, run.backend) == (0.5, 1, "gloo")
    assert run.predicted_step_seconds == 1.0
    assert run_folders(temporary) == []


def rank_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-3])


def test_all_reasons_to_refuse_are_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "free_memory_bytes", lambda: 1e9)
    result = cpu_result(stage_bytes=2e9)
    bfloat16 = replace(result.inputs.job, precision=Precision.BFLOAT16)
    plan = plan_of(GPT, bfloat16, (2, 2), microbatch_size=2)
    result = replace(result, plan=plan, inputs=replace(result.inputs, job=bfloat16))
    with pytest.raises(InputError) as caught:
        launch(result, LaunchSettings(max_ranks=1))
    text = str(caught.value)
    assert "the plan has 2 ranks, one process each; the limit is 1 (--max-ranks)" in text
    # Two stages of 2 GB and two workers of 0.3 GB.
    assert "need 4.284 GiB, this machine has 953.7 MiB free" in text
    assert "bfloat16; the trainer has float32 on a cpu device" in text
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    ("kinds", "have", "backend"),
    [
        (["cpu", "cpu"], [], "cpu"),
        (["nvidia-a100-80gb-sxm"] * 2, ["nvidia-a100-sxm4-80gb"] * 2, "cuda"),
        (["nvidia-a100"], ["nvidia-a1000"], None),
        (["nvidia-h200"] * 2, ["nvidia-h200"], None),
        (["nvidia-h200", "cpu"], ["nvidia-h200"] * 2, None),
    ],
)
def test_kinds_are_matched_with_what_is_here(
    kinds: list[str], have: list[str], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_accelerators", lambda: have)
    if backend is None:
        with pytest.raises(InputError, match="this machine has"):
            torch_backend(kinds, ())
    else:
        assert torch_backend(kinds, ()) == backend
    assert torch_backend(kinds, kinds) == "cpu"


# ---- faults

# What the ranks need to be ended, on a machine whose cores are shared with other tests.
ALLOWANCE_SECONDS = 9.0


def faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make every launch start ranks that go wrong."""
    monkeypatch.setattr(ranks, "WORKER", "faulty_worker")
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def fault_of(on_step: OnStep | None = None, **settings: object) -> tuple[RunFault, str]:
    with pytest.raises(RunFailed) as caught:
        launch(
            cpu_result(),
            LaunchSettings(steps=10_000, **settings),  # type: ignore[arg-type]
            on_step=on_step,
        )
    assert workers() == []
    return caught.value.fault, str(caught.value)


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "raise:1:6")
    fault, text = fault_of()
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_FAILED, (1,))
    assert text.splitlines()[0] == (
        "rank 1 ended with code 1 (cpu, stage 1) in forward pass of microbatch 1: "
        "ValueError: a matrix of the wrong shape"
    )
    assert "faulty_worker.py" in text  # where it was raised


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_last_checkpoint_too(tmp_path: Path) -> None:
    stopped: list[float] = []

    def stop(record: StepRecord) -> None:
        if record.step == 3:
            stopped.append(time.monotonic())
            os.kill(next(pid for pid in workers() if rank_of(pid) == 1), signal.SIGSTOP)

    save = tmp_path / "checkpoints"
    fault, text = fault_of(
        on_step=stop, checkpoints=CheckpointRequest(save=str(save), save_every=2)
    )
    assert time.monotonic() - stopped[0] < SILENT_SECONDS + ALLOWANCE_SECONDS
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_HANGS, (1,))
    assert fault.seconds >= SILENT_SECONDS
    assert "its process was not heard of" in text
    # The stop may have come while the checkpoint of the fourth step was saved.
    last = next(name for name in ("step-00000004", "step-00000002") if (save / name).is_dir())
    assert f"the last good checkpoint is {save / last}; go on from it with --load" in text


# ---- from one launch to the next


@pytest.mark.slow
def test_a_launch_goes_on_under_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for path, plan in (
        (one, plan_of(LLAMA, job(), (3, 1), microbatch_size=2)),
        (two, plan_of(LLAMA, job(), (4,), tp=2, microbatch_size=4)),
    ):
        save_result(result_of(LLAMA, CPUS, job(), plan), path)
    home, log = tmp_path / "ckpt", tmp_path / "runs.jsonl"
    launch_file(one, steps=4, save=home, save_every=3, run_log=log)
    assert checkpoints_in(home) == (step_folder(home, 4), step_folder(home, 3))
    launch_file(two, steps=6, save=home, load=home, check_loss=True, run_log=log)
    out, err = capsys.readouterr()
    assert f"goes on from {step_folder(home, 4)}, after 4 steps" in err
    assert "at step 5, " in out
    assert "the losses agree with those of one process" in out
    first, second = read_runs(log)
    assert [each.step for each in (*first.steps, *second.steps)] == list(range(6))
    expected = reference_losses(LLAMA, job(), steps=6, microbatch_size=2)
    found = [each.loss for each in (*first.steps, *second.steps)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert checkpoints_in(home) == (step_folder(home, 6), step_folder(home, 4))


@pytest.mark.slow
def test_the_whole_loop(tmp_path: Path) -> None:
    files = local_loop.LoopFiles(folder=tmp_path)
    waited: list[str] = []
    local_loop.profile_this_cpu(files, waited.append)
    local_loop.make_kinds(files, waited.append)
    local_loop.profile_links(files, waited.append)
    local_loop.fit_and_plan(files, waited.append)
    uneven, even = local_loop.train(files, 5, waited.append)
    said = (local_loop.profile_lines, local_loop.kind_lines, local_loop.plan_lines)
    assert all(len(line) <= 80 for lines in said for line in lines(files))
    layers = [stage.num_layers for stage in load_legal_plan(files.uneven).plan.pipelines[0].stages]
    assert len(set(layers)) > 1, "two unlike kinds got equal stages"
    assert losses(uneven) == pytest.approx(losses(even), rel=1e-4)
    if not (uneven.valid and even.valid):
        pytest.skip("the machine is too busy to compare times: too many passes overran")
    assert uneven.median_step_seconds < even.median_step_seconds
    assert abs(uneven.relative_error) < 0.25, "the demo promises 10 % on a quiet machine"


def losses(run: RunLog) -> list[float]:
    return [step.loss for step in run.steps]
