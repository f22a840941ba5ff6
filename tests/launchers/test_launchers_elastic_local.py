"""An elastic run on this machine alone: the same plan again after a rank dies; plans for parts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import elastic_cases
import pytest
import torch
from launch_results import result_of
from runtime_cases import CPUS, GPT, job, plan_of
from test_launchers_local import workers

from hetplan.errors import InfeasibleError, InputError
from hetplan.launchers.elastic import ElasticRun, Ended, Rules
from hetplan.launchers.elastic_backend import (
    HostBackend,
    Replanner,
    elastic_settings,
    replanner_for,
)
from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.launchers.local import LaunchSettings
from hetplan.plans.check import check_plan
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.single import reference_losses
from hetplan.runtime.training import CheckpointRequest
from hetplan.search.result import SearchResult

STEPS = 8


@pytest.mark.slow
def test_a_rank_is_killed_and_the_same_plan_goes_on(tmp_path: Path) -> None:
    given = result_of(GPT, CPUS, job(), plan_of(GPT, job(), (4,), microbatch_size=2))
    killed: list[int] = []

    def kill(record: StepRecord) -> None:
        if record.step == 4 and not killed:
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    told: list[str] = []
    checkpoints = CheckpointRequest(save=str(tmp_path / "ckpt"), save_every=2)
    settings, _ = elastic_settings(
        given,
        LaunchSettings(steps=STEPS, checkpoints=checkpoints, log_folder=tmp_path / "log"),
    )
    backend = HostBackend(
        given,
        settings,
        run_log=None,
        replanner=None,
        on_step=kill,
        tell=told.append,
    )
    run = ElasticRun(backend, Rules(), total_steps=STEPS)
    history = run.train()

    assert [phase.hosts for phase in history.phases[:2]] == [(THIS_MACHINE,)] * 2
    first, last = history.phases[0], history.phases[-1]
    assert first.ended is Ended.FAULT
    assert "SIGKILL" in first.reason
    assert history.phases[1].first_step == first.checkpoint_step == 4
    assert last.ended is Ended.FINISHED
    assert workers() == []
    torch.set_num_threads(1)
    expected = reference_losses(GPT, job(), steps=STEPS, microbatch_size=2)
    assert [step.loss for step in history.steps] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def given() -> SearchResult:
    return elastic_cases.planned()


def test_plans_for_parts_use_the_hosts_that_are_left(given: SearchResult) -> None:
    asks, _ = elastic_cases.predictor()
    replanner = Replanner(given, asks, limit_seconds=10.0)
    whole = replanner.plan(replanner.hosts, None)
    assert whole.result is given
    for gone in replanner.hosts:
        left = [name for name in replanner.hosts if name != gone]
        found = replanner.plan(left, None)
        assert set(found.used_hosts) <= set(left)
        inputs = found.result.inputs
        assert not list(check_plan(found.result.plan, inputs.model, inputs.cluster, inputs.job))
        # A plan for fewer devices is never predicted to be faster.
        assert found.step_seconds >= whole.step_seconds * (1 - 1e-9)
        # Devices keep the numbers that they have in the given plan's cluster.
        cluster = given.inputs.cluster
        islands = {
            cluster.island_of_device(each.device).name for each in place_ranks(found.result.plan)
        }
        assert islands <= {island.name for island in cluster.islands}
        assert inputs.model == given.inputs.model
        assert inputs.cluster.num_devices == cluster.num_devices


def test_pins_that_what_is_left_cannot_keep_are_no_plan(given: SearchResult) -> None:
    from dataclasses import replace

    asks, _ = elastic_cases.predictor()
    pinned = replace(given.inputs.job, pin=replace(given.inputs.job.pin, pp=4))
    inputs = replace(given.inputs, job=pinned)
    replanner = Replanner(replace(given, inputs=inputs), asks, limit_seconds=10.0)
    with pytest.raises(InfeasibleError, match="pinned degrees need at least 4 devices"):
        replanner.plan(("north1", "north2", "south1"), None)


def test_a_search_that_nobody_needs_any_more_ends(given: SearchResult) -> None:
    from hetplan.launchers.elastic_backend import CancelledError

    asks, _ = elastic_cases.predictor()
    replanner = Replanner(given, asks, limit_seconds=10.0)
    with pytest.raises(CancelledError):
        replanner.plan(("north1", "north2"), None, lambda: True)
    # It was no answer: asked again it is searched.
    assert replanner.plan(("north1", "north2"), None).used_hosts == ("north1", "north2")


def test_another_predictor_than_the_plan_s_is_refused(given: SearchResult) -> None:
    _, digest = elastic_cases.predictor()
    asks, _ = elastic_cases.predictor()
    assert replanner_for(given, asks, digest, limit_seconds=1.0).hosts
    with pytest.raises(InputError, match="another predictor"):
        replanner_for(given, asks, "0" * 64, limit_seconds=1.0)


def test_an_elastic_run_needs_checkpoints(given: SearchResult, tmp_path: Path) -> None:
    for request in (CheckpointRequest(), CheckpointRequest(save=str(tmp_path))):
        with pytest.raises(InputError, match="--save-every"):
            elastic_settings(given, LaunchSettings(checkpoints=request))
