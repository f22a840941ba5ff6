"""What does a burst of products say of training?

A benchmark's burst is a few launches with pauses between shapes: it ends before the power limit
slows the device. Training runs at that limit, so a product that is kept up takes longer:

    seconds = burst * sustained_factor(device, format, operations of the launch)

Sustained over burst, the same products in runs of 0.3 to 1 s with their power sampled
(github.com/ai-dynamo/aiconfigurator, commit 095f58a; frameworks and versions as pairs):

    operations      2e9 to 2e10   to 2e11   to 2e12   above
    H200, bf16      1.00          1.18      1.15      1.05
    B200, bf16      .98, .98      1.15      1.14      1.13, 1.04
    GB200, bf16     .99           1.21      1.19      1.08
    GB200, FP8      1.00          1.02      1.12      1.11

Above 2e12 operations a burst is throttled already. So a kind whose largest bursts are no slower
than its middle ones is not at its limit, and its bursts are kept up.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from hetplan.job.spec import Precision, ProductFormat
from hetplan.profiling.samples import OperatorSample

_EDGES = (2e10, 2e11, 2e12)
_BFLOAT16 = (1.0, 1.17, 1.155, 1.075)  # means of the four rows above
_FLOAT8 = (1.0, 1.02, 1.12, 1.11)
SUSTAINED: Mapping[str, tuple[float, float, float, float]] = {
    Precision.BFLOAT16.value: _BFLOAT16,
    Precision.FLOAT16.value: _BFLOAT16,  # not measured: as bfloat16
    ProductFormat.FLOAT8.value: _FLOAT8,
    ProductFormat.NVFP4.value: _FLOAT8,  # not measured: as FP8
}
"""Sustained over burst time of launches below and between `_EDGES` operations."""
WITHOUT_LIMIT = frozenset({"nvidia-a100-80gb-sxm", "nvidia-rtx-pro-6000-96gb"})
"""Kinds whose bursts are kept up. Median rates of bf16 launches of 2e11 to 2e12 operations over
those of larger ones: .98 and 1.00; of eight other kinds 1.03 (H100) to 1.17 (B300, GB200). A100's
bursts reach .78 to .80 of its peak, its products in a profiler's loops .79."""
BY_OTHERS_LOG_HALFWIDTH = 0.24
"""What sums of operators of such tables, bursts slowed, lie off layers and operators that were
measured otherwise on their chips (A100-40, A100-PCIe, GH200, B200): 90 % of 24 passes. In it are
other frameworks' kernels (the same product in two: .83 to 1.19) and the error of the factor."""
_80_OVER_90 = NormalDist().inv_cdf(0.9) / NormalDist().inv_cdf(0.95)
"""Half-widths of a normal law's intervals: from p10 to p90 over from p5 to p95."""
_OFF = round(math.exp(BY_OTHERS_LOG_HALFWIDTH * _80_OVER_90), 3)
"""p90 of a slowed burst over its median; more digits are not known."""


def sustained_factor(device: str, precision: str, flops: float) -> float:
    """How many times as long a launch of a burst takes when it is kept up."""
    if device in WITHOUT_LIMIT:
        return 1.0
    return SUSTAINED[precision][bisect(_EDGES, flops)]


def kept_up(burst: OperatorSample) -> OperatorSample:
    """A product's burst as training runs it: one figure, and how far it may be off."""
    flops = 2.0 * burst.batch * burst.m * burst.n * burst.k
    seconds = burst.median_seconds * sustained_factor(burst.device, burst.precision, flops)
    return replace(
        burst,
        median_seconds=seconds,
        p10_seconds=seconds / _OFF,
        p90_seconds=seconds * _OFF,
        repeats=1,
    )


def figure_log_halfwidth(sample: OperatorSample) -> float:
    """Half-width of the 90 % interval of a sample's one figure; 0 for a median of runs.

    How far runs scatter says little of their median.
    """
    if sample.repeats > 1 or not 0.0 < sample.p10_seconds <= sample.p90_seconds:
        return 0.0
    return math.log(sample.p90_seconds / sample.p10_seconds) / 2.0 / _80_OVER_90
