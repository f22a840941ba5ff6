"""An elastic run on this machine alone: the same plan again after a rank dies; plans for parts;
which hosts are used, and used again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import elastic_cases
import pytest
import torch
from elastic_cases import cluster
from hypothesis import given
from hypothesis import strategies as st
from launch_results import result_of
from runtime_cases import CPUS, GPT, job, plan_of
from test_launchers_local import workers

from hetplan.emulation import running
from hetplan.emulation.layout import lay_out
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.launchers.elastic import (
    ElasticRun,
    Ended,
    HostBook,
    Rules,
    mutually_reachable,
)
from hetplan.launchers.elastic_backend import (
    CancelledError,
    HostBackend,
    Replanner,
    elastic_settings,
    reachable,
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
def whole() -> SearchResult:
    return elastic_cases.planned()


def test_plans_for_parts_use_the_hosts_that_are_left(whole: SearchResult) -> None:
    asks, _ = elastic_cases.predictor()
    replanner = Replanner(whole, asks, limit_seconds=10.0)
    of_all = replanner.plan(replanner.hosts, None)
    assert of_all.result is whole
    for gone in replanner.hosts:
        left = [name for name in replanner.hosts if name != gone]
        found = replanner.plan(left, None)
        assert set(found.used_hosts) <= set(left)
        inputs = found.result.inputs
        assert not list(check_plan(found.result.plan, inputs.model, inputs.cluster, inputs.job))
        # A plan for fewer devices is never predicted to be faster.
        assert found.step_seconds >= of_all.step_seconds * (1 - 1e-9)
        # Devices keep the numbers that they have in the given plan's cluster.
        cluster = whole.inputs.cluster
        islands = {
            cluster.island_of_device(each.device).name for each in place_ranks(found.result.plan)
        }
        assert islands <= {island.name for island in cluster.islands}
        assert inputs.model == whole.inputs.model
        assert inputs.cluster.num_devices == cluster.num_devices


def test_a_search_that_nobody_needs_any_more_ends(whole: SearchResult) -> None:
    asks, _ = elastic_cases.predictor()
    replanner = Replanner(whole, asks, limit_seconds=10.0)
    with pytest.raises(CancelledError):
        replanner.plan(("north1", "north2"), None, lambda: True)
    # It was no answer: asked again it is searched.
    assert replanner.plan(("north1", "north2"), None).used_hosts == ("north1", "north2")


def test_another_predictor_than_the_plan_s_is_refused(whole: SearchResult) -> None:
    _, digest = elastic_cases.predictor()
    asks, _ = elastic_cases.predictor()
    assert replanner_for(whole, asks, digest, limit_seconds=1.0).hosts
    with pytest.raises(InputError, match="another predictor"):
        replanner_for(whole, asks, "0" * 64, limit_seconds=1.0)


def test_an_elastic_run_needs_checkpoints(whole: SearchResult, tmp_path: Path) -> None:
    for request in (CheckpointRequest(), CheckpointRequest(save=str(tmp_path))):
        with pytest.raises(InputError, match="--save-every"):
            elastic_settings(whole, LaunchSettings(checkpoints=request))


# ---- which hosts are used


@given(
    names=st.lists(st.sampled_from("abcdefgh"), unique=True),
    missing=st.sets(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"))),
    silent=st.sets(st.sampled_from("abcdefgh")),
)
def test_joined_hosts_reach_each_other_and_none_is_left_out_for_nothing(
    names: list[str], missing: set[tuple[str, str]], silent: set[str]
) -> None:
    reaches = {
        one: {two for two in names if (one, two) not in missing}
        for one in names
        if one not in silent
    }
    found = mutually_reachable(names, reaches)
    assert list(found) == [name for name in names if name in found]
    for one in found:
        for two in found:
            assert one == two or two in reaches[one]
    if not missing:
        assert set(found) == set(names) - silent
    for other in set(names) - set(found) - silent:
        # Whoever is left out lacks somebody that answered.
        assert any(
            two != other and (two not in reaches[other] or other not in reaches[two])
            for two in reaches
        )


def test_a_region_that_is_cut_off_keeps_the_larger_part() -> None:
    north, south = ("n1", "n2", "n3"), ("s1", "s2")
    reaches = {one: set(side) for side in (north, south) for one in side}
    assert mutually_reachable((*south, *north), reaches) == north


def test_nobody_is_left_out_for_a_link_between_two_hosts() -> None:
    book = HostBook(("a", "b", "c"), answers_needed=3)
    for _ in range(5):
        assert book.blame(("a", "b")) == ""
    assert book.usable == ("a", "b", "c")


def test_a_probe_that_does_not_end_silences_no_other_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, *others = everyone = ("north1", "north2", "south1", "south2")
    emulation = lay_out(cluster(), name="test")
    addresses = [
        address
        for host in emulation.hosts
        if host.name != silent
        for address in (host.data_address, host.control_address)
    ]

    def start(
        emulation: Emulation, host: str, command: Sequence[str], *, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes]:
        words = ("sleep", "60") if host == silent else ("echo", json.dumps(addresses))
        return subprocess.Popen(words, stdout=stdout, stderr=stderr, start_new_session=True)

    monkeypatch.setattr(running, "start", start)
    monkeypatch.setattr("hetplan.launchers.elastic_backend.LIMIT_SECONDS", 1.0)
    assert reachable(emulation, everyone) == tuple(others)
