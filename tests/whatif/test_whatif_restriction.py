"""What a target costs: the same question asked of a trainer that can run more plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.deadline import ends_by
from hetplan.errors import OutOfTimeError
from hetplan.job.spec import Forbids, Pins, TrainerOptions
from hetplan.kernels import clock
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.plans import homogeneous_lines
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.table_maker import TableMaker
from hetplan.whatif.baselines import (
    MIXES,
    WIDER,
    homogeneous_sum,
    restriction,
    strongest_alone,
)
from hetplan.whatif.smaller_questions import Answers

PREDICTOR = FittedPredictor.datasheet_only()


def _find(trainer: str, options: TrainerOptions | None = None) -> SearchResult:
    where = cluster(
        island("slow", kind="old", teraflops=40.0, nodes=1, per_node=2),
        island("quick", kind="new", teraflops=120.0, nodes=1, per_node=2),
    )
    asked = replace(job(8, gap=0.05), target=trainer, trainer=options or TrainerOptions())
    return search(model(6), where, asked, PREDICTOR)


@pytest.mark.parametrize("trainer", ["flagscale", "megatron", "torchtitan"])
def test_more_plans_are_never_slower(trainer: str) -> None:
    result = _find(trainer)
    found = restriction(result, Answers(PREDICTOR))
    assert found is not None
    assert found.target == WIDER
    # The plan itself is known to the wider search from the beginning.
    assert found.lower_bound_seconds <= found.step_seconds
    assert found.step_seconds <= result.estimate.step_seconds * (1.0 + 1e-9)


def test_nothing_is_compared_where_no_time_is_left() -> None:
    found = _find("flagscale")
    with pytest.raises(OutOfTimeError), ends_by(clock() - 0.01):
        restriction(found, Answers(PREDICTOR))


def test_a_known_plan_is_kept_where_there_is_no_time_to_list_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = _find("flagscale")

    def families(_: TableMaker) -> None:
        raise OutOfTimeError

    monkeypatch.setattr(TableMaker, "families", property(families))
    inputs = known.inputs
    found = search(inputs.model, inputs.cluster, inputs.job, PREDICTOR, start=(known.plan,))
    assert found.plan == known.plan
    proof = found.certificate
    assert proof is not None
    assert (proof.status, proof.lower_bound_seconds, proof.gap) == ("limit", 0.0, 1.0)
    assert (proof.candidates, proof.pruned_by_bound, proof.left_open) == (0, 0, 0)


def _two_makers() -> Cluster:
    slow = island("slow", kind="old", teraflops=40.0, nodes=1, per_node=2)
    quick = island("quick", kind="new", teraflops=50.0, nodes=1, per_node=2)
    return cluster(
        replace(slow, device=replace(slow.device, vendor="amd")),
        replace(quick, device=replace(quick.device, vendor="nvidia")),
    )


def test_what_a_mix_of_libraries_would_give_is_asked_of_flagscale() -> None:
    result = search(model(6), _two_makers(), job(8, gap=0.05), PREDICTOR)
    found = restriction(result, Answers(PREDICTOR))
    assert found is not None
    assert (found.target, found.libraries, found.mixed) == (MIXES, ("rccl", "nccl"), True)
    assert found.lower_bound_seconds <= found.step_seconds < result.estimate.step_seconds
    figure = homogeneous_sum(result, Answers(PREDICTOR))
    assert strongest_alone(result, figure, Answers(PREDICTOR)) is None
    # FlagScale has no context parallelism: what pins it is asked of nobody, or of native.
    pinned = replace(result.inputs.job, pin=Pins(cp=2))
    alone = replace(result, inputs=replace(result.inputs, job=pinned))
    assert restriction(alone, Answers(PREDICTOR)) is None
    patched = replace(job(8, gap=0.05), trainer=TrainerOptions(mixed_libraries=True))
    both = restriction(search(model(6), _two_makers(), patched, PREDICTOR), Answers(PREDICTOR))
    assert both is not None
    assert (both.target, both.libraries) == (WIDER, ())


def test_the_best_kind_alone_is_asked_under_megatron_too() -> None:
    asked = replace(job(8, gap=0.05), target="flagscale")
    result = search(model(6), _two_makers(), asked, PREDICTOR)
    figure = homogeneous_sum(result, Answers(PREDICTOR))
    found = strongest_alone(result, figure, Answers(PREDICTOR))
    assert found is not None
    target, best = found.target, found.kind
    assert best.device == "new"
    assert best.tokens_per_second >= max(kind.tokens_per_second for kind in figure.kinds)
    stock = search(
        model(6),
        result.inputs.cluster,
        replace(job(8), forbid=Forbids(islands=("slow",))),
        PREDICTOR,
    )
    assert target in ("megatron", "flagscale")
    assert best.tokens_per_second <= stock.estimate.tokens_per_second * (1 + 1e-9)


def test_a_plan_of_one_kind_is_what_this_kind_reaches_alone() -> None:
    only_new = replace(job(8, gap=0.05), forbid=Forbids(islands=("slow",)))
    found = search(model(6), _two_makers(), only_new, PREDICTOR)
    result = replace(found, inputs=replace(found.inputs, job=job(8, gap=0.05)))
    with ends_by(clock() + 0.4):  # too little to begin a search
        slow, new = homogeneous_sum(result, Answers(PREDICTOR)).kinds
    assert "not searched" in slow.reason
    assert new.tokens_per_second == result.estimate.tokens_per_second
    assert (new.reason, new.gap) == ("", found.certificate.gap if found.certificate else 1.0)


def test_kinds_that_no_time_was_left_for_have_no_ratio() -> None:
    asked = replace(job(8, gap=0.05), target="flagscale")
    result = search(model(6), _two_makers(), asked, PREDICTOR)
    with ends_by(clock() + 0.4):  # too little to begin a search
        figure = homogeneous_sum(result, Answers(PREDICTOR))
    assert figure.homogeneous_sum_ratio is None
    first, *_, ratio = homogeneous_lines(figure)
    assert "not searched alone" in first
    assert "counts" not in first
    assert "unknown" in ratio


def test_nothing_is_compared_where_the_wider_trainer_lacks_what_the_job_asks_for() -> None:
    result = _find("megatron", TrainerOptions(overlap_grad_reduce=True))
    assert restriction(result, Answers(PREDICTOR)) is None
