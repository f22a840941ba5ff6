"""Plans are trained for real, watched, and refused where this machine cannot run them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch_results import result_of
from runtime_cases import (
    CPUS,
    GPT,
    cluster,
    island,
    job,
    plan_of,
)

from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.launchers import local, ranks
from hetplan.launchers.local import LaunchSettings, launch, torch_backend
from hetplan.model.spec import TRAINED_KINDS
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry
from hetplan.runtime.measured import StepRecord
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult

MIXED = cluster(island("a", "fast", 2), island("b", "slow", 2))


def pace(**layer_seconds: float) -> Pace:
    return Pace(
        kinds=tuple(
            PacedKind(
                device=device,
                slow_down=1.0,
                entries=tuple(
                    PaceEntry(
                        layer=layer,
                        phase=phase,
                        microbatch_size=2,
                        tp=1,
                        seconds=seconds * (2 if phase == "backward" else 1),
                    )
                    for layer in TRAINED_KINDS
                    for phase in ("forward", "backward")
                ),
            )
            for device, seconds in layer_seconds.items()
        )
    )


def mixed_result(**changes: object) -> SearchResult:
    task = job()
    plan = plan_of(GPT, task, (3, 1), MIXED, "ab", microbatch_size=2)
    return result_of(GPT, MIXED, task, plan, **changes)


def cpu_result(**changes: object) -> SearchResult:
    plan = plan_of(GPT, job(), (2, 2), microbatch_size=2)
    return result_of(GPT, CPUS, job(), plan, **changes)


def workers(parent: int | None = None) -> list[int]:
    """Worker processes of this process (or another launcher) that run."""
    wanted = str(parent or os.getpid())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "hetplan.launchers.worker" in words and words[-2] == wanted:
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
    task = job()
    plan = plan_of(GPT, task, (3, 1), MIXED, "ab", microbatch_size=4)
    with pytest.raises(InputError) as refused:
        launch(
            result_of(GPT, MIXED, task, plan),
            LaunchSettings(steps=2, pace=pace(fast=0.01, slow=0.02)),
        )
    text = str(refused.value)
    # Stage 0 has the embedding, stage 1 the head.
    assert "kind fast has no forward time for layer embedding, microbatch_size 4, tp 1" in text
    assert "kind slow has no backward time for layer head, microbatch_size 4, tp 1" in text
    assert "kind fast has no forward time for layer head" not in text
    assert "--microbatch" in text
    assert not list(temporary.iterdir())


def test_limits_that_no_clock_can_hold_are_refused() -> None:
    for seconds in (float("inf"), float("nan"), 0.0, -1.0, 1e12):
        with pytest.raises(InputError, match="timeout is"):
            launch(cpu_result(), LaunchSettings(steps=2, timeout_seconds=seconds))
    with pytest.raises(InputError, match="stall is 0 s"):
        LaunchSettings(stall_seconds=0.0)


def test_ranks_are_started_watched_and_their_report_is_a_run(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks that train nothing; those that do are the next test's."""
    monkeypatch.setattr(ranks, "WORKER", "faulty_worker")
    monkeypatch.setenv("FAULT", "pretend:0:3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    told: list[StepRecord] = []
    run = launch(cpu_result(), LaunchSettings(steps=3), on_step=told.append)
    assert [step.loss for step in run.steps] == [step.loss for step in told] == [4.0, 3.0, 2.0]
    assert (run.median_step_seconds, run.warmup_steps, run.backend) == (0.5, 1, "gloo")
    assert run.predicted_step_seconds == 0.02
    assert run_folders(temporary) == []


def rank_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-3])


@pytest.mark.slow
def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_result(cpu_result(), path)
    code = (
        "import sys; from pathlib import Path\n"
        "from hetplan.launchers.local import LaunchSettings, launch\n"
        "from hetplan.search.files import load_plan\n"
        "plan, settings = load_plan(Path(sys.argv[1])), LaunchSettings(steps=10_000)\n"
        "launch(plan, settings, on_step=lambda step: print(step))\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-c", code, path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert launcher.stdout is not None
        assert "step=0" in launcher.stdout.readline()
        started = workers(launcher.pid)
        assert len(started) == 2
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    limit = time.monotonic() + 10
    while workers(launcher.pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert workers(launcher.pid) == []


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


def test_accelerators_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_accelerators", list)
    with pytest.raises(InputError, match=r"has no accelerator .* play fast, slow on"):
        launch(mixed_result())
    with pytest.raises(InputError, match="play slow on"):
        launch(mixed_result(), LaunchSettings(pace=pace(fast=0.1)))


@pytest.mark.parametrize(
    ("kinds", "have", "backend"),
    [
        (["cpu", "cpu"], [], "cpu"),
        (["nvidia-a100-80gb-sxm"] * 2, ["nvidia-a100-sxm4-80gb"] * 2, "cuda"),
        (["nvidia-h200"], ["nvidia-h200"] * 8, "cuda"),
        (["amd-mi300x"], ["amd-instinct-mi300x"], "cuda"),
        (["amd-mi300x"], ["nvidia-h200"], None),
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
