"""`hetplan launch --save`, then `--load` under another plan, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_results import result_of
from runtime_cases import CPUS, LLAMA, job, plan_of

from hetplan.cli.launch import run as launch
from hetplan.errors import InputError
from hetplan.launchers.run_log import read_runs
from hetplan.plans.plan import Plan
from hetplan.runtime.checkpoints import checkpoints_in, step_folder
from hetplan.runtime.single import reference_losses
from hetplan.search.files import save_result


def plan_file(path: Path, plan: Plan) -> Path:
    save_result(result_of(LLAMA, CPUS, job(), plan), path)
    return path


@pytest.mark.slow
def test_a_launch_goes_on_under_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = plan_file(tmp_path / "one.json", plan_of(LLAMA, job(), (3, 1), microbatch_size=2))
    two = plan_file(tmp_path / "two.json", plan_of(LLAMA, job(), (4,), tp=2, microbatch_size=4))
    home, log = tmp_path / "ckpt", tmp_path / "runs.jsonl"
    launch(one, steps=4, save=home, save_every=3, run_log=log)
    assert checkpoints_in(home) == (step_folder(home, 4), step_folder(home, 3))
    launch(two, steps=6, save=home, load=home, check_loss=True, run_log=log)
    out, err = capsys.readouterr()
    assert f"goes on from {step_folder(home, 4)}, after 4 steps" in err
    assert "step 5/6: loss" in err
    assert "at step 5, " in out
    assert "the losses agree with those of one process" in out
    first, second = read_runs(log)
    assert [each.step for each in (*first.steps, *second.steps)] == list(range(6))
    expected = reference_losses(LLAMA, job(), steps=6, microbatch_size=2)
    found = [each.loss for each in (*first.steps, *second.steps)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert checkpoints_in(home) == (step_folder(home, 6), step_folder(home, 4))


def test_what_cannot_be_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "one.json", plan_of(LLAMA, job(), (4,)))
    for settings, message in (
        ({"save_every": 2}, "needs a folder to save to"),
        ({"load": tmp_path / "nowhere"}, "there is no such folder"),
        ({"load": tmp_path}, "holds no whole checkpoint"),
    ):
        with pytest.raises(InputError, match=message):
            launch(plan, **settings)  # type: ignore[arg-type]
