"""Nodes used in part where watts of a site or cores of hosts do not allow all of their devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_search import Problem, solve
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster, Island, Site
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.step_model.step import norm_depth, norm_rounds, scalar_term
from hetplan.errors import InfeasibleError, InputError
from hetplan.files.encoding import to_plain
from hetplan.job.spec import Pins
from hetplan.plans.assemble import device_ranges, positions, stages_with_room
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenStage, Part, Shape
from hetplan.plans.limits import unlimited
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import expand
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.explained import idle_lines
from hetplan.reports.summary import summarize
from hetplan.search.result import OTHER_PARTS_LEFT_OUT, Question, SearchResult
from hetplan.search.search import search
from hetplan.whatif import within_limits as within_limits_
from hetplan.whatif.ask import carried, searched
from hetplan.whatif.idle import idle_reasons
from hetplan.whatif.within_limits import full_limits, keeps_limits, within_limits

_PREDICTOR = FittedPredictor.datasheet_only()
_PLAIN = Pins(pipelines=1, cp=1, ep=1, virtual_stages=1, depth=0)
"""What the reference search lists."""


def one_site(nodes: int, per_node: int, cores: int | None = None, **limits: float) -> Cluster:
    """One island whose devices draw 500 W computing."""
    own = replace(island("a", nodes=nodes, per_node=per_node), power_watts=500.0, cpu_cores=cores)
    site = Site(name="A", regions=("here",), **limits)  # type: ignore[arg-type]
    return replace(cluster(own), sites=(site,))


def used(found: SearchResult) -> list[int]:
    """Devices in use, by node."""
    (mine,) = (mine for _, mine in used_devices(found.plan, found.inputs.cluster))
    return [int(n) for n in mine.sum(axis=1)]


def asked(within: Cluster, batch: int = 12, **settings: object) -> Question:
    return Question(model=model(4), cluster=within, job=replace(job(batch), **settings))  # type: ignore[arg-type]


def every_part(within: Cluster) -> Iterator[Cluster]:
    """The cluster of one island with parts of its nodes, in every way."""
    (own,) = within.islands
    sizes = range(1, own.devices_per_node + 1)
    for part, last, nodes in product(sizes, sizes, range(1, own.nodes + 1)):
        if last <= part:
            parts = (*(part,) * (nodes - 1), last, *(0,) * (own.nodes - nodes))
            yield within.with_island(replace(own, node_parts=parts))


def free(question: Question) -> SearchResult | None:
    """The best plan of a question whose limits are left out; None where there is none."""
    try:
        return search(question.model, question.cluster, question.job, _PREDICTOR)
    except (InfeasibleError, InputError):
        return None


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 3), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_equal_stages_lie_in_the_parts_as_often_as_there_is_room(
    part: int, last: int, nodes: int, size: int
) -> None:
    parts = (*(part,) * nodes, min(part, last))
    own = replace(island("a", nodes=nodes + 1, per_node=8), node_parts=parts)
    whole, room = cluster(own), stages_with_room(own, 1, size)
    if size < part and 8 % size == 0:
        assert room == sum(each // size for each in parts)
    starts = positions([size] * room, own.filled_node, nodes + 1, own.usable_parts)
    assert starts is not None
    lie = [[divmod(d, 8) for r in device_ranges(whole, own, at, size) for d in expand((r,))]
           for at in starts]  # fmt: skip
    every = [device for stage in lie for device in stage]
    assert len({*every}) == room * size
    assert all(local < parts[node] for node, local in every)
    assert all(len({node for node, _ in stage}) == 1 or size % part == 0 for stage in lie)
    one_more = (size,) * (room + 1)
    assert not room or positions(one_more, own.filled_node, nodes + 1, own.usable_parts) is None


@pytest.mark.parametrize("parts", [(3, 3), (3, 0), (4, 2), (4, 3), (3, 2)])
def test_plans_on_parts_are_those_of_the_reference_search(parts: tuple[int, ...]) -> None:
    whole = one_site(2, 4)
    within = whole.with_island(replace(whole.islands[0], node_parts=parts))
    question = asked(within, 6, pin=_PLAIN)
    found = free(question)
    expected = solve(Problem(Pricer(question.model, within, question.job, _PREDICTOR)))
    assert found is not None
    assert expected is not None
    assert found.estimate.step_seconds == pytest.approx(expected.step_seconds, rel=1e-8)
    assert not check_plan(found.plan, question.model, within, question.job)
    assert all(n <= part for n, part in zip(used(found), parts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (3, 2), (4, 3), (2, 8)])
def test_limits_on_power_give_the_best_plan_of_all_parts(shape: tuple[int, int]) -> None:
    every = [free(asked(within)) for within in every_part(one_site(*shape))]
    for part in (0.3, 0.45, 0.6, 0.7, 0.8, 0.9):
        watts = part * shape[0] * shape[1] * 500.0
        question = asked(one_site(*shape, power_limit_watts=watts))
        kept = [e for e in every if e and keeps_limits(e.plan, e.estimate, question)]
        found = searched(question, _PREDICTOR)
        assert keeps_limits(found.plan, found.estimate, question)
        least = min(each.estimate.step_seconds for each in kept)
        assert found.estimate.step_seconds <= least * (1.0 + 1e-9)


def test_a_plan_on_parts_below_the_bound_of_whole_nodes_is_not_called_optimal() -> None:
    # Three ranks divide the batch, and no stage of whole nodes has three.
    question = asked(one_site(2, 4, power_limit_watts=2600.0), 9, pin=replace(_PLAIN, tp=1))
    question = replace(question, model=model(6))
    found = searched(question, _PREDICTOR)
    whole = free(question.changed(cluster=unlimited(question.cluster, question.job)))
    assert used(found) == [3, 0]
    assert whole is not None
    assert found.certificate is not None
    assert whole.certificate is not None
    step, bound = found.estimate.step_seconds, found.certificate.lower_bound_seconds
    assert bound <= step < whole.certificate.lower_bound_seconds
    assert found.certificate.status == "open"
    assert found.certificate.space.endswith(OTHER_PARTS_LEFT_OUT)
    assert found.certificate.gap == 1.0 - bound / step
    assert OTHER_PARTS_LEFT_OUT in "\n".join(summarize(found).lines(width=200))


def test_a_plan_on_parts_is_kept_where_it_is_known_and_legal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = asked(one_site(2, 4, power_limit_watts=2600.0), 9, pin=replace(_PLAIN, tp=1))
    question = replace(question, model=model(6))
    known = searched(question, _PREDICTOR)
    more = question.changed(cluster=one_site(2, 4, power_limit_watts=2650.0))
    assert carried(known, more) == known.plan
    assert carried(known, more.changed(cluster=one_site(2, 4))) is None
    assert carried(known, more.changed(cluster=one_site(3, 4, power_limit_watts=2650.0))) is None

    monkeypatch.setattr(within_limits_, "_MOST_ASKED", 1)
    without = searched(more, _PREDICTOR)
    found = searched(more, _PREDICTOR, start=[known.plan])
    assert without.estimate.step_seconds > found.estimate.step_seconds
    assert found.plan == known.plan
    assert found.estimate.step_seconds == known.estimate.step_seconds
    assert found.certificate is not None
    assert found.certificate.status == "open"
    assert found.certificate.space.endswith(OTHER_PARTS_LEFT_OUT)
    pinned = more.with_pins(dp=1)
    assert searched(pinned, _PREDICTOR, start=[known.plan]).plan != known.plan


def test_the_bound_of_a_plan_on_parts_is_the_least_of_all_searches_on_parts() -> None:
    question = asked(one_site(2, 4, power_limit_watts=2600.0), 9, pin=replace(_PLAIN, tp=1))
    question = replace(question, model=model(6))

    def ask(each: Question, journal: object) -> SearchResult:
        found = search(each.model, each.cluster, each.job, _PREDICTOR)
        parts = each.cluster.islands[0].usable_parts
        if parts != (3,) or found.certificate is None:
            return found
        low = replace(found.certificate, lower_bound_seconds=0.03, status="limit")
        return replace(found, certificate=low)

    found = within_limits(question, ask)
    assert found.certificate is not None
    assert found.certificate.lower_bound_seconds == 0.03
    assert found.certificate.gap == 1.0 - 0.03 / found.estimate.step_seconds
    assert found.certificate.status == "limit"


def test_megatrons_stages_fill_parts_of_nodes_only_within_power_or_cores() -> None:
    limited = one_site(2, 4, power_limit_watts=3500.0)
    within = limited.with_island(replace(limited.islands[0], node_parts=(3, 3)))
    question = asked(within, 12, pin=replace(_PLAIN, tp=1, pp=1, dp=6))
    found = free(question)
    assert found is not None
    assert used(found) == [3, 3]

    def faults(place: Cluster, **settings: object) -> list[str]:
        job_ = replace(question.job, **settings)  # type: ignore[arg-type]
        return [each.message for each in check_plan(found.plan, question.model, place, job_)]

    assert not faults(limited)
    assert not faults(one_site(2, 4, 31), cpu_cores_per_device=8)
    for place in (one_site(2, 4), one_site(2, 4, 31), one_site(2, 4, max_nodes=2)):
        (fault,) = faults(place)
        assert "a stage lies in one node or fills whole ones" in fault


def test_the_norm_of_a_stage_on_parts_of_two_nodes_crosses_their_link() -> None:
    whole = one_site(2, 4)
    (own,) = whole.islands
    question = asked(whole.with_island(replace(own, node_parts=(2, 2))))
    question = question.with_job(pin=replace(_PLAIN, tp=1, pp=1, dp=4))
    found = free(question)  # search and pricing agree, or it raises
    assert found is not None
    assert used(found) == [2, 2]
    step = Pricer(question.model, whole, question.job, _PREDICTOR).step(found.plan)
    once = scalar_term(own.inter_node, _PREDICTOR).seconds
    levels = norm_rounds(question.job) * norm_depth(4)
    assert step.composed.norm_seconds == pytest.approx(levels * once, rel=1e-12)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ((4,), "node_parts has 1 of 3 nodes"),
        ((5, 4, 4), "node_parts has 5 of the 4 devices"),
        ((4, 2, -1), "node_parts has -1 of the 4 devices"),
        ((2, 0, 4), "the largest must come first"),
    ],
)
def test_parts_that_no_node_has_and_those_out_of_order_are_refused(
    parts: tuple[int, ...], fault: str
) -> None:
    own = island("a", nodes=3, per_node=4)
    with pytest.raises(InputError, match=fault):
        replace(own, node_parts=parts)
    assert replace(own, nodes_out=(0,), node_parts=(0, 4, 2)).usable_parts == (4, 2)


def test_what_has_no_room_on_parts_is_told_their_devices() -> None:
    whole = one_site(3, 4)
    within = whole.with_island(replace(whole.islands[0], node_parts=(4, 2, 0)))
    part = Part(island="a", shape=Shape(tp=1, dp=8, microbatch_size=1))
    stage = ChosenStage(parts=(part,), layers=(4,), warmup_depth=1)
    found = free(asked(whole))
    assert found is not None
    chosen = chosen_of(found.plan, whole, found.inputs.job, found.inputs.model)
    pipeline = replace(chosen.pipelines[0], stages=(stage,))
    with pytest.raises(InputError, match="1 usable nodes of 4 devices and 1 usable nodes of 2 dev"):
        plan_of(model(4), within, job(8), replace(chosen, pipelines=(pipeline,)))


def test_watts_that_feed_no_second_node_feed_a_part_of_one() -> None:
    question = asked(one_site(1, 8, power_limit_watts=3000.0))
    found = searched(question, _PREDICTOR)
    assert used(found) == [6]
    assert not found.inputs.cluster.islands[0].node_parts
    assert "node_parts" not in str(to_plain(replace(island("a", nodes=1), node_parts=(1,))))


@pytest.mark.parametrize(("cores", "devices"), [(16, 2), (31, 3), (32, 4)])
def test_hosts_run_as_many_devices_as_they_have_cores_for(cores: int, devices: int) -> None:
    question = asked(one_site(2, 4, cores), cpu_cores_per_device=8)
    found = searched(question, _PREDICTOR)
    assert used(found) == [devices] * 2
    assert not check_plan(found.plan, question.model, question.cluster, question.job)
    (own,) = question.cluster.islands
    parts: Island = replace(own, node_parts=(devices,) * 2)
    best = free(question.with_island(parts))
    assert best is not None
    assert found.estimate.step_seconds == best.estimate.step_seconds


@pytest.mark.parametrize(
    ("within", "idle"),
    [
        (one_site(1, 8, power_limit_watts=3000.0), "2 of 8 devices idle: power_limit of A"),
        (one_site(2, 4, 31), "2 of 8 devices idle: cpu_cores of a"),
        (one_site(2, 4, max_nodes=1), "4 of 8 devices idle: max_nodes of A"),
    ],
)
def test_the_limit_that_keeps_devices_idle_is_named(within: Cluster, idle: str) -> None:
    found = searched(asked(within, cpu_cores_per_device=8), _PREDICTOR)
    (line,) = idle_lines(idle_reasons(found, _PREDICTOR), found)
    assert line == f"a, {idle} has no room for more of them"


@pytest.mark.parametrize(("out", "full"), [((), False), ((1, 2), True)])
def test_cores_of_hosts_are_full_where_no_node_has_room(out: tuple[int, ...], full: bool) -> None:
    within = one_site(3, 2, 16)
    question = asked(within, pin=replace(_PLAIN, tp=1, pp=2, dp=1), cpu_cores_per_device=8)
    found = searched(question, _PREDICTOR)
    assert used(found) == [2, 0, 0]
    (own,) = within.islands
    fewer = replace(found.inputs, cluster=within.with_island(replace(own, nodes_out=out)))
    assert full_limits(replace(found, inputs=fewer), "a") == ["cpu_cores of a"] * full


def test_a_limit_that_is_not_full_is_named_where_without_it_a_plan_is_faster() -> None:
    # Three devices divide the batch, two do not.
    question = asked(one_site(3, 1, max_nodes=2), 9, pin=replace(_PLAIN, pp=1, tp=1))
    found = searched(question, _PREDICTOR)
    assert used(found) == [1, 0, 0]
    (line,) = idle_lines(idle_reasons(found, _PREDICTOR), found)
    assert line.startswith(
        "a, 2 of 3 devices idle: max_nodes of A leaves no room for a faster plan with more of "
        "them; without that +"
    )
