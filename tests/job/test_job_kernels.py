"""Kernels that an architecture lacks: told by the data, before a plan and of a plan."""

from dataclasses import replace

from plans_of_many import small_job
from trainer_models import llama
from trainer_plans import cluster, island

from hetplan.cluster.catalogue import load_catalogue
from hetplan.job.kernels import CONTEXT_PARALLEL, job_on, kernel_fault, known_lacks
from hetplan.job.spec import Forbids, Precision, TrainerOptions
from hetplan.plans.check_job import check_job_against
from hetplan.predict.sustained import sustained_rate

KINDS = {each.kind: each for each in load_catalogue()}


def test_every_rule_is_of_a_known_architecture():
    known = {each.architecture for each in KINDS.values()}
    assert {name for each in known_lacks() for name in each.architectures} <= known


def test_v100_has_no_bfloat16_and_no_context_parallel_attention():
    v100, a100 = KINDS["nvidia-v100-16gb-sxm"], KINDS["nvidia-a100-80gb-sxm"]
    assert kernel_fault(v100, "bfloat16", "native")
    assert kernel_fault(v100, CONTEXT_PARALLEL, "megatron")
    assert not kernel_fault(v100, CONTEXT_PARALLEL, "torchtitan")
    assert not kernel_fault(v100, "float16", "megatron")
    assert not kernel_fault(a100, CONTEXT_PARALLEL, "megatron")
    assert kernel_fault(KINDS["nvidia-h100-80gb-sxm"], "mxfp8", "megatron")


def test_v100_keeps_its_scores_where_an_a100_of_the_same_job_does_not():
    v100, a100 = KINDS["nvidia-v100-16gb-sxm"], KINDS["nvidia-a100-80gb-sxm"]
    asked = small_job(8, "megatron")
    assert job_on(v100, asked).trainer.fused_attention is False
    assert job_on(a100, asked) is asked
    native = small_job(8, "native")
    assert job_on(v100, native) is native
    unfused = replace(asked, trainer=TrainerOptions(fused_attention=False))
    assert job_on(v100, unfused) is unfused


def test_a_kernel_that_no_device_of_the_kind_has_cannot_be_asked_for():
    asked = replace(small_job(8, "megatron"), trainer=TrainerOptions(fused_attention=True))
    machines = cluster(island("old", kind="nvidia-v100-16gb-sxm"), island("new"))
    asked = replace(asked, precision=Precision.FLOAT16)
    fields = [each.field for each in check_job_against(asked, llama(4), machines)]
    assert fields == ["trainer.fused_attention"]
    without = replace(asked, forbid=Forbids(islands=("old",)))
    assert check_job_against(without, llama(4), machines) == ()
    # Nobody asked: it runs, and an estimate says how.
    default = replace(asked, trainer=TrainerOptions())
    assert check_job_against(default, llama(4), machines) == ()


def test_nothing_is_sustained_above_its_peak():
    for kind in KINDS.values():
        for name, peak in kind.peak_flops_per_second:
            rate = sustained_rate(kind, name)
            assert rate is not None
            assert rate <= max(peak, dict(kind.peak_flops_per_second).get("tf32", 0.0))
