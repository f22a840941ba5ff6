"""The search as its users see it: pins, forbids, limits, reasons, files."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError, LimitError
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress
from hetplan.whatif.baselines import homogeneous_sum, operations_per_token

PREDICTOR = FittedPredictor.datasheet_only()


def mixed() -> Cluster:
    return cluster(
        island("slow", kind="old", teraflops=40.0, nodes=1, per_node=4),
        island("quick", kind="new", teraflops=120.0, nodes=1, per_node=4),
    )


def find(asked: Job, of: Cluster | None = None, layers: int = 8) -> SearchResult:
    return search(model(layers), of or mixed(), asked, PREDICTOR)


def test_a_plan_is_legal_and_better_layers_go_to_the_faster_island() -> None:
    result = find(job(16))
    inputs = result.inputs
    assert check_plan(result.plan, inputs.model, inputs.cluster, inputs.job) == ()
    assert result.certificate.status == "optimal"
    per_layer = {stage.island: stage.transformer_layers for stage in result.estimate.stages}
    assert per_layer["quick"] > per_layer.get("slow", 0)


@pytest.mark.parametrize(
    ("pin", "holds"),
    [
        (Pins(tp=2), lambda r: r.plan.pipelines[0].stages[0].replicas[0].tp == 2),
        (Pins(dp=4), lambda r: r.plan.pipelines[0].stages[0].replicas[0].dp == 4),
        (Pins(pp=3), lambda r: len(r.plan.pipelines[0].stages) == 3),
        (
            Pins(microbatch_size=4),
            lambda r: r.plan.pipelines[0].stages[0].replicas[0].microbatch_size == 4,
        ),
        (
            Pins(recompute=True),
            lambda r: r.plan.pipelines[0].stages[0].recompute.granularity.value == "full",
        ),
        (Pins(embedding_on="slow"), lambda r: r.estimate.stages[0].island == "slow"),
        (Pins(embedding_on="new"), lambda r: r.estimate.stages[0].island == "quick"),
        (
            Pins(head_on="old", pp=2),
            lambda r: r.estimate.stages[-1].island == "slow" and len(r.estimate.stages) == 2,
        ),
    ],
)
def test_pins_are_kept_and_cost_nothing_but_time(pin: Pins, holds) -> None:  # type: ignore[no-untyped-def]
    free = find(job(8))
    pinned = find(replace(job(8), pin=pin))
    assert holds(pinned)
    assert pinned.estimate.step_seconds >= free.estimate.step_seconds * (1 - 1e-8)


def test_forbidden_islands_and_nodes_stay_unused() -> None:
    only = find(replace(job(8), forbid=Forbids(islands=("quick",))))
    assert {stage.island for stage in only.estimate.stages} == {"slow"}
    of = cluster(island("a", nodes=4, per_node=2))
    asked = replace(job(8), forbid=Forbids(nodes=("a/1", "a/2")))
    result = find(asked, of)
    used = {d for s in result.plan.pipelines[0].stages for r in s.replicas for d in _devices(r)}
    assert used <= {0, 1, 6, 7}


def _devices(replica) -> set[int]:  # type: ignore[no-untyped-def]
    return {d for part in replica.devices for d in part.devices()}


def test_native_has_a_microbatch_for_every_stage() -> None:
    result = find(job(2, target="native"))
    assert result.estimate.num_microbatches >= len(result.estimate.stages)


def test_a_wider_gap_is_never_better_and_is_kept() -> None:
    exact, order_free = find(job(8)), find(job(8, gap=0.2))
    assert exact.estimate.step_seconds <= order_free.estimate.step_seconds * (1 + 1e-9)
    assert order_free.certificate.gap <= 0.2
    assert order_free.certificate.lower_bound_seconds <= exact.estimate.step_seconds * (1 + 1e-9)


def test_unknown_names_are_input_errors() -> None:
    with pytest.raises(InputError, match="no island or device kind named nowhere"):
        find(replace(job(8), pin=Pins(embedding_on="nowhere")))


def test_no_time_gives_a_limit_error() -> None:
    with pytest.raises(LimitError, match="time limit"):
        find(replace(job(8), time_limit_seconds=0.0))


def test_an_interrupt_keeps_the_best_plan() -> None:
    def stop(progress: Progress) -> None:
        if progress.best_seconds < float("inf"):
            raise KeyboardInterrupt

    result = search(model(8), mixed(), job(16), PREDICTOR, progress=stop)
    assert result.certificate.status == "interrupted"
    assert result.certificate.lower_bound_seconds <= result.estimate.step_seconds


def test_a_limit_keeps_the_best_plan() -> None:
    def wait(progress: Progress) -> None:
        if progress.best_seconds < float("inf"):
            time.sleep(1.5)

    asked = replace(job(16), time_limit_seconds=1.5)
    result = search(model(8), mixed(), asked, PREDICTOR, progress=wait)
    proof = result.certificate
    assert proof.status == "limit"
    assert proof.pruned_by_bound >= 0
    assert proof.pruned_by_bound + proof.searched + proof.left_open >= proof.candidates
    assert proof.closed_by_program + proof.closed_by_listing <= proof.searched
    exact = find(job(16))
    assert result.certificate.lower_bound_seconds <= exact.estimate.step_seconds * (1 + 1e-9)


def test_the_homogeneous_sum_counts_a_kind_that_cannot_train_with_its_roofline() -> None:
    of = cluster(
        island("big", kind="new", nodes=1, per_node=4),
        island("tiny", kind="old", teraflops=40.0, gigabytes=0.2, nodes=1),
    )
    result = find(job(8), of)
    figure = homogeneous_sum(result, PREDICTOR)
    big, tiny = figure.kinds
    assert (big.device, big.devices, big.reason) == ("new", 4, "")
    assert tiny.tokens_per_second == 0.0
    assert tiny.reason.startswith("memory:")
    operations = operations_per_token(result.inputs.model, result.inputs.job)
    assert tiny.roofline_tokens_per_second == pytest.approx(40e12 / operations)
    expected = result.estimate.tokens_per_second / (
        big.tokens_per_second + tiny.roofline_tokens_per_second
    )
    assert figure.homogeneous_sum_ratio == pytest.approx(expected)
    # 6 operations per parameter and token, the attention core and the head's vocabulary beside it.
    spec = result.inputs.model
    embedding = spec.vocab_size * spec.hidden_size
    assert operations == pytest.approx(6 * (spec.parameter_count - embedding), rel=0.1)


def test_operations_per_token_count_layers_of_several_shapes() -> None:
    plain = model(8)
    (run,) = plain.layer_runs
    wide = replace(run.layer, mlp=replace(run.layer.mlp, ffn_hidden_size=4096))
    unlike = replace(plain, layer_runs=(replace(run, count=6), replace(run, layer=wide, count=2)))
    asked = job(16)
    of_plain, of_wide = (
        operations_per_token(replace(plain, layer_runs=(replace(run, layer=layer),)), asked)
        for layer in (run.layer, wide)
    )
    expected = of_plain + (of_wide - of_plain) * 2 / 8
    assert of_wide != of_plain
    assert operations_per_token(unlike, asked) == pytest.approx(expected)
