"""Kernels that an architecture lacks: told by the data, before a plan and of a plan."""

from dataclasses import replace

from plans_of_many import small_job

from hetplan.cluster.catalogue import load_catalogue
from hetplan.job.spec import TrainerOptions
from hetplan.plans.kernels import CONTEXT_PARALLEL, job_on, kernel_fault, known_lacks
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


def test_nothing_is_sustained_above_its_peak():
    for kind in KINDS.values():
        for name, peak in kind.peak_flops_per_second:
            rate = sustained_rate(kind, name)
            assert rate is not None
            assert rate <= max(peak, dict(kind.peak_flops_per_second).get("tf32", 0.0))
