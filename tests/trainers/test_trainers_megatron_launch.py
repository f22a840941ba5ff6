"""The arguments of a Megatron-LM launch, and the networks of its groups."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import yaml
from megatron_reader import read_run
from one_pipeline import StageChoice, build_plan
from trainer_models import llama
from trainer_plans import (
    STAGED,
    any_estimate,
    cluster,
    flags,
    island,
    job_of,
    launched,
    megatron,
    messages,
    random_results,
    result_of,
    stage_per_island,
    with_plan,
)

from hetplan.cluster.load import load_cluster
from hetplan.model.load import load_model
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    LayerRange,
)
from hetplan.trainers.megatron.parallel import group_networks

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
    plan = build_plan(model, machines, job, choices, Shape(tp=8, dp=8, microbatch_size=1))
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


def test_only_the_groups_that_are_staged_get_sockets() -> None:
    """Two nodes a stage in two regions: pipelines cross, data-parallel groups stay inside."""
    result = stage_per_island(
        cluster(island("a", "n"), island("b", "s"), across=STAGED, fabric=("mlx5_0",)),
        3,
        5,
        tp=8,
        dp=2,
    )
    launch = launched(result)
    (file,) = launch.files
    networks = yaml.safe_load(file.text)
    sockets = {name for name, each in networks.items() if each == {"net_name": "Socket"}}
    assert sockets == {"pp", "embd", "mp", "intra_dist_opt_instance"}
    assert {name: networks[name] for name in networks if name not in sockets} == {
        name: {"net_name": "IB"} for name in ("dp", "dp_cp", "tp_dp", "tp_dp_cp")
    }
    assert ("--nccl-communicator-config-path", "{folder}/transport.yaml") in launch.arguments
    assert any("NCCL_NET=Socket" in remark for remark in launch.remarks)


def test_names_of_groups_are_megatrons() -> None:
    """Every name is one that the wheel asks get_nccl_options for."""
    (source,) = (
        file.read_text()
        for file in files("megatron-core") or ()
        if file.as_posix() == "megatron/core/parallel_state.py"
    )
    known = set(re.findall(r'get_nccl_options\("(\w+)"', source))
    named = {
        network.group
        for result in random_results(megatron, seed=5, count=100)
        for network in group_networks(result.plan, result.inputs.cluster)
    }
    assert named <= known
    assert {"pp", "dp", "mp", "ep", "ep_dp", "tp_ep_pp", "embd"} <= named
