"""Sites that train by themselves and are averaged."""

from __future__ import annotations

import json
from functools import partial

import pytest
from forked_ranks import run_ranks
from local_steps_ranks import DRIFTING, EQUAL, LocalCase, main

from hetplan.cost.local_steps import gatherings
from hetplan.runtime.single import reference_losses

pytestmark = pytest.mark.xdist_group("runtime_local_steps")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """What rank 0 saw of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(partial(main, (*EQUAL, *DRIFTING)), folder)
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "0.json").read_text())
    return found


def synchronous(case: LocalCase) -> tuple[float, ...]:
    return reference_losses(case.model, case.job, steps=case.steps, microbatch_size=4)


@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.name)
def test_averaging_after_every_step_of_sgd_is_the_synchronous_run(case, losses):
    # The mean of the sites' steps is a step by the mean of their gradients: sites count by their
    # samples, the outer step takes the mean as it is.
    assert losses[case.name]["whole"] == pytest.approx(synchronous(case), rel=1e-5)


@pytest.mark.parametrize("case", [each for each in DRIFTING if each.stopped], ids=lambda c: c.name)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_was_not(case, losses):
    assert losses[case.name]["pieces"] == losses[case.name]["whole"]


def test_equal_runs_have_equal_losses_bit_by_bit(losses):
    assert losses["streamed"]["whole"] == losses["streamed again"]["whole"]


def test_a_sharded_optimizer_is_averaged_as_a_whole_one(losses):
    whole = losses["unsharded"]["whole"]
    assert whole[0] != whole[-1]
    assert losses["sharded"]["whole"] == pytest.approx(whole, rel=1e-4)


def test_float32_weights_are_gathered_as_often_as_is_priced(losses):
    case = next(each for each in DRIFTING if each.name == "sharded")
    task = case.job
    times = gatherings(task.synchronisation, case.plan.sharding, task.precision)
    assert losses["sharded"]["gathered"] == [times * case.steps]


def test_sites_that_drift_differ_from_the_synchronous_run_and_learn_as_it_does(losses):
    case = next(each for each in DRIFTING if each.steps == 40)
    local, together = losses[case.name]["whole"], synchronous(case)
    assert local[0] == pytest.approx(together[0], rel=1e-6)
    assert local[2] != pytest.approx(together[2], rel=1e-6)
    assert local[-1] < local[0] - 0.5 * (together[0] - together[-1])
