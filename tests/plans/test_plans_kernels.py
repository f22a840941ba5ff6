"""Kernels that an architecture lacks: told by the data, before a plan and of a plan."""

from hetplan.cluster.catalogue import load_catalogue
from hetplan.plans.kernels import CONTEXT_PARALLEL, kernel_fault, known_lacks
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


def test_nothing_is_sustained_above_its_peak():
    for kind in KINDS.values():
        for name, peak in kind.peak_flops_per_second:
            rate = sustained_rate(kind, name)
            assert rate is not None
            assert rate <= max(peak, dict(kind.peak_flops_per_second).get("tf32", 0.0))
