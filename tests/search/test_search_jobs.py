"""The search as its users see it: pins, forbids, limits, reasons, files."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, mixed, model

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.cost.model_flops import flops_per_token
from hetplan.errors import InfeasibleError
from hetplan.job.spec import Forbids, Job, Pins, Precision
from hetplan.plans.check_target import MAX_PASSES
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress
from hetplan.whatif.baselines import homogeneous_sum
from hetplan.whatif.smaller_questions import Answers

PREDICTOR = FittedPredictor.datasheet_only()


def find(asked: Job, of: Cluster | None = None, layers: int = 8) -> SearchResult:
    return search(model(layers), of or mixed(), asked, PREDICTOR)


def test_forbidden_islands_and_nodes_stay_unused() -> None:
    only = find(replace(job(8), forbid=Forbids(islands=("quick",))))
    assert {stage.island for stage in only.estimate.stages} == {"slow"}
    of = cluster(island("a", nodes=4, per_node=2))
    asked = replace(job(8), forbid=Forbids(nodes=("a/1", "a/2")))
    result = find(asked, of)
    used = {d for s in result.plan.pipelines[0].stages for r in s.replicas for d in _devices(r)}
    assert used <= {0, 1, 6, 7}


def test_no_plan_has_more_passes_than_a_step_may_have() -> None:
    """The search has the rule of the plan: it does not offer what that refuses."""
    pins = Pins(tp=1, cp=1, dp=1, microbatch_size=1, schedule="1f1b")
    of = cluster(island("a", nodes=1, per_node=8))
    asked = replace(job(MAX_PASSES // 6, gap=0.9), pin=pins)
    found = find(asked, of, layers=16).plan.pipelines[0]
    assert len(found.stages) * found.num_microbatches <= MAX_PASSES
    with pytest.raises(InfeasibleError):
        find(replace(asked, pin=replace(pins, pp=8)), of, layers=16)
    with pytest.raises(InfeasibleError):
        find(replace(asked, global_batch_size=3 * MAX_PASSES), of, layers=16)


def test_a_certificate_names_the_schedules_that_were_searched() -> None:
    def space(**pins: int) -> str:
        result = find(replace(job(16), pin=Pins(tp=1, microbatch_size=1, **pins)))
        assert result.certificate is not None
        return result.certificate.space.partition("schedules ")[2].partition(";")[0]

    assert space(virtual_stages=2) == "interleaved-1f1b with 2 virtual stages"
    assert space(virtual_stages=1) == "1f1b"


def _devices(replica) -> set[int]:  # type: ignore[no-untyped-def]
    return {d for part in replica.devices for d in part.devices()}


def _old_and_new(architecture: str) -> Cluster:
    """The mixed cluster; its slow devices are of this architecture."""
    slow, quick = mixed().islands
    old = replace(slow, device=replace(slow.device, architecture=architecture))
    return replace(mixed(), islands=(old, quick))


@pytest.mark.parametrize("target", ["megatron", "flagscale"])
def test_kinds_without_fused_attention_keep_scores_and_others_do_not(target: str) -> None:
    pin = Pins(recompute=False, embedding_on="slow")
    asked = replace(job(8, target=target), precision=Precision.FLOAT16, pin=pin)
    new, old = (find(asked, _float16(_old_and_new(each))) for each in ("sm80", "sm70"))
    assert new.estimate.step_seconds < old.estimate.step_seconds
    priced = estimate(old.plan, model(8), _float16(_old_and_new("sm80")), asked, PREDICTOR)
    for kept, fused in zip(old.estimate.stages, priced.stages, strict=True):
        if kept.island == "slow":
            # Scores of 8 heads, 1,024 x 1,024, two bytes, in every layer.
            least = kept.transformer_layers * 8 * 1024**2 * 2
            assert kept.memory.activation_bytes > fused.memory.activation_bytes + least
            assert kept.forward_seconds > fused.forward_seconds
        else:
            assert kept.memory == fused.memory
            assert kept.forward_seconds == fused.forward_seconds


def _float16(of: Cluster) -> Cluster:
    """The same devices with rates in float16."""
    return replace(
        of,
        islands=tuple(
            replace(
                each,
                device=replace(
                    each.device,
                    peak_flops_per_second=(("float16", each.device.peak_flops_per_second[0][1]),),
                ),
            )
            for each in of.islands
        ),
    )


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
    figure = homogeneous_sum(result, Answers(PREDICTOR))
    big, tiny = figure.kinds
    assert (big.device, big.devices, big.reason) == ("new", 4, "")
    assert tiny.tokens_per_second == 0.0
    assert tiny.reason.startswith("memory:")
    operations = flops_per_token(result.inputs.model, result.inputs.job)
    assert tiny.roofline_tokens_per_second == pytest.approx(40e12 / operations)
    expected = result.estimate.tokens_per_second / (
        big.tokens_per_second + tiny.roofline_tokens_per_second
    )
    assert figure.homogeneous_sum_ratio == pytest.approx(expected)
    # 6 operations per parameter and token, the attention core and the head's vocabulary beside it.
    spec = result.inputs.model
    embedding = spec.vocab_size * spec.hidden_size
    assert operations == pytest.approx(6 * (spec.parameter_count - embedding), rel=0.1)
