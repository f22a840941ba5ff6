"""The arguments of a Megatron-LM launch: layout, recomputation, formats, optimizer, run, data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_reader import read_run
from one_pipeline import StageChoice, build_plan
from trainer_models import llama
from trainer_plans import (
    any_estimate,
    cluster,
    flags,
    island,
    job_of,
    launched,
    messages,
    result_of,
    stage_per_island,
    with_plan,
)

from hetplan.cluster.load import load_cluster
from hetplan.model.load import load_model
from hetplan.plans.build import Degrees
from hetplan.plans.check import check_plan
from hetplan.plans.plan import (
    LayerRange,
)

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).with_name("golden_megatron_llama_140b.txt")


def test_the_arguments_of_a_known_plan() -> None:
    """Llama-140B over H100 and A100 nodes of the example cluster, byte for byte."""
    model = load_model(CONFIGS / "models/llama-140b.yaml")
    machines = load_cluster(CONFIGS / "clusters/three-regions.yaml")
    job = replace(job_of(1536), sequence_length=4096)
    choices = [
        *(StageChoice(island="h100", transformer_layers=10) for _ in range(7)),
        *(StageChoice(island="a100", transformer_layers=count) for count in (7, 7, 6, 6)),
    ]
    plan = build_plan(model, machines, job, choices, Degrees(tp=8, dp=8, microbatch_size=1))
    assert check_plan(plan, model, machines, job) == ()
    launch = launched(result_of(machines, plan, model, job, priced=any_estimate()))
    text = "".join(f"{' '.join(entry)}\n" for entry in launch.arguments)
    assert text == GOLDEN.read_text()
    assert read_run(launch.arguments, 704).num_microbatches == 192


# ---- layout, recomputation, formats


def test_multi_token_prediction_stands_with_the_head() -> None:
    model = llama(8)
    model = replace(model, num_mtp_layers=2, mtp_layer=model.layer_runs[0].layer)
    result = stage_per_island(cluster(island("a", "n"), island("b", "n")), 3, 5, model=model)
    found = flags(result)
    assert found["--pipeline-model-parallel-layout"] == ("Et*3|t*5m*2L",)
    assert found["--mtp-num-layers"] == ("2",)
    assert read_run(launched(result).arguments, 16).ranks[-1].mtp == (2,)
    (pipeline,) = result.plan.pipelines
    first, last = pipeline.stages
    apart = (
        replace(first, chunks=(LayerRange(start=0, stop=10),)),
        replace(last, chunks=(LayerRange(start=10, stop=11),)),
    )
    cut = with_plan(result, pipelines=(replace(pipeline, stages=apart),))
    assert any("cut between stages 0 and 1" in each for each in messages(cut))
