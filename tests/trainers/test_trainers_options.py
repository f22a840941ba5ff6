"""What a user says beside the plan is refused where no trainer can be told, or the plan says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_models import MODEL
from trainer_plans import JOB, chosen, cluster, island, result_of, two_regions, with_job

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.errors import InputError
from hetplan.plans.build import plan_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import rank_layout
from hetplan.trainers import trainer_named
from hetplan.trainers.emission import (
    option_faults,
    plan_faults,
    refusals,
)
from hetplan.trainers.folder import check_place

REAL = {"data": ("/a",), "tokenizer": "/t", "learning_rate": 1e-4}


def test_options_that_no_trainer_can_be_told():
    for options, field, says in (
        ({"python": " "}, "--python", "is empty"),
        ({"learning_rate": float("nan")}, "--learning-rate", "nan; a rate is a number"),
        ({**REAL, "tokenizer": ""}, "--tokenizer", "is missing"),
        ({**REAL, "data": ("/a", "-d")}, "--data", "begins with '-'"),
        ({**REAL, "data": ("",)}, "--data", "is empty"),
    ):
        (fault,) = option_faults(EmissionOptions(**options))
        assert fault.field == field
        assert says in fault.message


def test_what_the_plan_says_is_not_said_again():
    for word in (
        *("--tensor-model-parallel-size", "--context-parallel-size=2", "--micro-batch-size"),
        *("--expert_model_parallel_size", "--pipeline-model-parallel-layout", "--num-layers"),
        *("--decoder-first-pipeline-num-layers=3", "--rampup-batch-size", "--seq-length"),
        *("--use-tp-pp-dp-mapping", "--recompute-granularity", "--yaml-cfg"),
        *("--hetero-process-meshes", "--parallelism.tensor_parallel_degree"),
        *("--parallelism.module_fqns_per_model_part", "--training.local_batch_size"),
    ):
        (fault,) = option_faults(EmissionOptions(extra_arguments=("--log-throughput", word, "2")))
        assert fault.field == "--extra"
        assert fault.message.startswith(f"{word.partition('=')[0]} is what the plan says")
        assert not plan_faults((fault,))


def test_a_domain_of_an_island_that_is_not_there_starts_nothing():
    result = two_regions()
    domain = LaunchDomain(name="lab", islands=("nroth",), ssh_user="me")
    machines = replace(result.inputs.cluster, launch_domains=(domain,))
    with pytest.raises(InputError, match="unknown island 'nroth'; nearest: north") as caught:
        rank_layout(result.plan, machines)
    (fault,) = caught.value.faults
    assert fault.field == "inputs.cluster.launch_domains[0].islands[0]"


def test_folders_that_cannot_be_written_are_refused_beforehand(tmp_path):
    for name, says in (
        ("a\nb", "has a control character in its path"),
        ("x" * 300, "File name too long; choose another place"),
    ):
        with pytest.raises(InputError, match=says):
            check_place(tmp_path / name, force=False)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "flagscale"])
def test_two_formats_in_one_plan_are_refused_by_name(target):
    machines = cluster(island("north"))
    plan = plan_of(MODEL, machines, JOB, chosen(("north", 6), ("north", 6), tp=2, dp=4))
    first, second = plan.reduction_groups
    groups = (replace(first, precision="float32"), replace(second, precision="bfloat16"))
    result = with_job(result_of(machines, replace(plan, reduction_groups=groups)), target="any")
    trainer = trainer_named(target)
    (fault,) = refusals(result, trainer, EmissionOptions())
    assert fault.field == "plan.reduction_groups[1].precision"
    assert fault.message.startswith(f"bfloat16; target {trainer.plan_target} ")
    assert "sums in float32" in fault.message
