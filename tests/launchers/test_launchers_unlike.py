"""Plans whose stages and pipelines are unlike are trained by `hetplan launch` as any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_results import result_of
from runtime_cases import FOURS, TIED_LLAMA, job, pipeline_of, unlike_plan

from hetplan.errors import InputError
from hetplan.launchers import local
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.search.result import SearchResult


def result(**changes: object) -> SearchResult:
    """Two pipelines of unlike cuts, degrees and shares on four ranks."""
    kinds = replace(
        FOURS,
        islands=tuple(
            replace(each, device=replace(each.device, kind="cpu")) for each in FOURS.islands
        ),
    )
    task = job(11, gradient_clipping=True)
    plan = unlike_plan(
        TIED_LLAMA,
        task,
        pipeline_of(4, ("a 1 2 1", 4)),
        pipeline_of(3, ("b 2 1 1", 4)),
        machines=kinds,
    )
    return result_of(TIED_LLAMA, kinds, task, plan, **changes)


@pytest.mark.slow
def test_unlike_pipelines_are_launched_and_their_losses_checked() -> None:
    run = launch(result(), LaunchSettings(steps=5, check_loss=True))
    assert run.loss_check is not None
    assert run.loss_check.equal, run.loss_check
    assert run.loss_check.largest_relative_difference < 1e-5
    assert [(each.stage, each.dp_index, each.tp_index) for each in run.ranks] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 0, 1),
    ]


def test_the_memory_of_all_pipelines_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "free_memory_bytes", lambda: 4 * local.WORKER_BYTES + 3.9e9)
    with pytest.raises(InputError, match="all ranks together need"):
        launch(result(stage_bytes=1e9), LaunchSettings(steps=2))
