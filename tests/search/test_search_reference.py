"""The search and the reference planner find equally fast plans; wrong answers do not pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle_instances import Instance, axes_of, listed
from oracle_judge import with_vendors
from reference_search import Problem, Solution, solve, validate

from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search

AXES = {
    "islands", "stages", "layers", "dp", "tp", "microbatch", "recompute", "sharding", "shapes",
    "tight", "regions", "limits", "tied",
}  # fmt: skip
"""Of the oracle's jobs, those that open nothing else are within the reference planner's reach."""
MAX_PLANS = 1_000
"""Of a job, as the oracle counts them."""
BLOCKS, FAST_BLOCKS = 117, 2
"""A block is one job as long as there are 117; a block without jobs fails."""


def jobs() -> list[Instance]:
    small = [row for row in listed() if row.plans <= MAX_PLANS and {*row.wanted} <= AXES]
    return [made for made in (row.instance() for row in small) if axes_of(made) <= AXES]


def problem_of(made: Instance) -> Problem:
    predictor = FittedPredictor.datasheet_only()
    return Problem(Pricer(made.model, made.cluster, made.job, predictor))


@pytest.mark.parametrize(
    "block",
    [
        block if block < FAST_BLOCKS else pytest.param(block, marks=pytest.mark.slow)
        for block in range(BLOCKS)
    ],
)
def test_the_search_finds_what_the_reference_planner_finds(block: int) -> None:
    chosen = jobs()[block::BLOCKS]
    assert chosen
    for made in chosen:
        problem = problem_of(made)
        best = solve(problem)
        try:
            result = search(made.model, made.cluster, made.job, problem.pricer.predictor)
        except (InfeasibleError, InputError):
            assert best is None
            continue
        assert best is not None
        step = result.estimate.step_seconds
        assert step == pytest.approx(best.step_seconds, rel=1e-8), made.job
        assert not validate(problem, result.plan, step)
        assert not validate(problem, best.plan, best.step_seconds)


def test_both_keep_to_one_library_where_the_trainer_has_one() -> None:
    several = [made for made in jobs() if len({i.device.kind for i in made.cluster.islands}) > 1]
    assert len(several) > 5
    for made in map(with_vendors, several[:6]):
        pin = replace(made.job.pin, cp=1, virtual_stages=1)
        made = replace(made, job=replace(made.job, target="megatron", pin=pin))
        problem = problem_of(made)
        best = solve(problem)
        try:
            result = search(made.model, made.cluster, made.job, problem.pricer.predictor)
        except InfeasibleError:
            assert best is None
            continue
        assert best is not None
        assert len({island.device.vendor for island in result.used_islands}) == 1
        assert result.estimate.step_seconds == pytest.approx(best.step_seconds, rel=1e-8)


def solved() -> tuple[Problem, Solution]:
    """A job whose best plan has several stages."""
    for made in jobs():
        problem = problem_of(made)
        best = solve(problem)
        if best is not None and len(best.plan.pipelines[0].stages) > 1:
            return problem, best
    raise LookupError


def broken(plan: Plan) -> dict[str, Plan]:
    """The plan with one fault, by the rule that it breaks."""
    first, *others = plan.pipelines[0].stages
    (chunk,), (replica,) = first.chunks, first.replicas

    def with_first(**changes: object) -> Plan:
        stages = (replace(first, **changes), *others)  # type: ignore[arg-type]
        return replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))

    shorter = replace(chunk, stop=chunk.stop - 1)
    elsewhere = others[0].replicas[0].devices
    return {
        "layers": with_first(chunks=(shorter,)),
        "devices": with_first(replicas=(replace(replica, devices=elsewhere),)),
        "batch": with_first(replicas=(replace(replica, microbatch_size=97),)),
    }


def test_validator_names_the_broken_rule() -> None:
    problem, best = solved()
    assert not validate(problem, best.plan, best.step_seconds)
    for rule, plan in broken(best.plan).items():
        named = {each.partition(":")[0] for each in validate(problem, plan, best.step_seconds)}
        assert rule in named
    (price,) = validate(problem, best.plan, 0.9 * best.step_seconds)
    assert price.startswith("price:")
