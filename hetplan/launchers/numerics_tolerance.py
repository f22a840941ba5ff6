"""How far may a device's result be from the exact one, if the device rounds as it should?

Rounding errors are taken as independent, of mean zero and at most the unit roundoff u each. A sum
of n products then deviates by about sqrt(n) u (rule of thumb of Wilkinson), and by more than
lambda sqrt(n) u with a probability below 2 exp(-lambda^2 / 2): Higham and Mary, "A new approach to
probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019), A2815, section 2. That
bound is relative to the sum of the terms' magnitudes; for terms of mean zero, as all inputs here
are, it holds relative to the result's own RMS: Higham and Mary, "Sharper probabilistic backward
error analysis for basic linear algebra kernels with random data", SIAM J. Sci. Comput. 42 (2020),
A3427.

Products of 16-bit numbers are summed in float32 and rounded once (Blanchard, Higham, Lopez, Mary
and Pranesh, "Mixed precision block fused multiply-add", SIAM J. Sci. Comput. 42 (2020), C124), and
elementary functions are computed in float32. So, with u of the job's format, w of float32 (or of
the job's where that is wider), and what `Roundings` counts of the operator:

    rms     <=  stored u + (inner + sqrt(length)) w
    largest <=  max(peak, lambda) (stored u + inner w) + lambda sqrt(length) w

where peak is the reference's largest value over its RMS (an error that is relative to its element
is largest there), and lambda makes the chance that any of N elements of a correct result exceeds
the bound `FAILURE`: lambda = sqrt(2 ln(2 N / FAILURE)). A whole layer counts the roundings of its
operators together: their first-order errors add up, each step's condition taken as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hetplan.job.spec import Precision
from hetplan.launchers.numerics_values import Allowed
from hetplan.model.operators import WITH_WEIGHTS, Operator, OperatorClass

FAILURE = 1e-6
"""Chance that a correct result is refused; a check has some hundred results."""

# Unit roundoff 2^-p of p significant bits (IEEE 754-2019, table 3.5; bfloat16: 8 bits).
UNIT_ROUNDOFFS = {
    Precision.FLOAT32: 2.0**-24,
    Precision.FLOAT16: 2.0**-11,
    Precision.BFLOAT16: 2.0**-8,
}
# Half the distance of subnormal numbers: what is lost of a result near zero.
_SUBNORMAL_ERRORS = {
    Precision.FLOAT32: 2.0**-150,
    Precision.FLOAT16: 2.0**-25,
    Precision.BFLOAT16: 2.0**-134,
}

# An elementary function in float32: at most 2 units in the last place, which is 4 roundoffs (CUDA
# C++ Programming Guide, appendix on mathematical functions: expf 2, erff 2, rsqrtf 2 ulp).
_FUNCTION = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """What happens to one element of a result on its way."""

    stored: float = 0.0
    """Roundings to the job's format."""
    inner: float = 0.0
    """Roundings to float32 that are relative to the element."""
    length: float = 0.0
    """Terms summed in float32."""
    peak: float = 0.0
    """Largest over RMS of what the roundings are relative to, where that is not the result."""

    def __add__(self, other: Roundings) -> Roundings:
        return Roundings(
            stored=self.stored + other.stored,
            inner=self.inner + other.inner,
            length=self.length + other.length,
            peak=max(self.peak, other.peak),
        )

    def times(self, count: float) -> Roundings:
        """As many in a row."""
        return Roundings(
            stored=count * self.stored,
            inner=count * self.inner,
            length=count * self.length,
            peak=self.peak,
        )


def allowed(
    roundings: Roundings, precision: Precision, *, elements: int, peak: float, rms: float
) -> Allowed:
    """The bound for a result of this many elements, with the peak and RMS of its reference."""
    u = UNIT_ROUNDOFFS[precision]
    w = min(u, UNIT_ROUNDOFFS[Precision.FLOAT32])
    each = roundings.stored * (u + _SUBNORMAL_ERRORS[precision] / rms) + roundings.inner * w
    summed = math.sqrt(roundings.length) * w
    chance = math.sqrt(2.0 * math.log(2.0 * elements / FAILURE))
    return Allowed(
        rms=each + summed, largest=max(peak, roundings.peak, chance) * each + chance * summed
    )


def forward_roundings(op: Operator) -> Roundings:
    """Of an operator's forward result."""
    kind = op.operator
    if kind in WITH_WEIGHTS or kind in (
        OperatorClass.ATTENTION_SCORE,
        OperatorClass.ATTENTION_CONTEXT,
    ):
        # The weights' scale, the result, and partial results of a sum that is split over cores
        # and kept in the job's format (torch.backends.cuda.matmul.allow_*_reduced_precision_...).
        return Roundings(stored=3.0, length=op.k)
    return _FORWARD[kind](op)


def backward_roundings(op: Operator, *, equal_tokens: int = 1) -> Roundings:
    """Of each of an operator's gradients; `equal_tokens`: how often one token is looked up."""
    kind = op.operator
    if kind in WITH_WEIGHTS:
        # The longer of the two gradients' sums: columns of the result, or tokens.
        return Roundings(stored=3.0, length=max(op.n, op.m))
    if kind in (OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT):
        return Roundings(stored=2.0, length=max(op.m, op.n, op.k))
    if kind is OperatorClass.EMBEDDING:
        # Rows of one token are added up in the table, in the job's format.
        return Roundings(stored=math.sqrt(equal_tokens), length=0.0)
    return _BACKWARD[kind](op)


def _fused_forward(op: Operator) -> Roundings:
    # Scores' exponents: an absolute error of a score is a relative one of its probability, and
    # scores of unit inputs stay below 5 or so. Stored: probabilities, result.
    return Roundings(stored=2.0, inner=_FUNCTION + 8.0, length=op.k + 2.0 * op.n)


def _fused_backward(op: Operator) -> Roundings:
    # Stored: probabilities, forward result (for the rows' sums), scores' gradient, result.
    return Roundings(stored=4.0, inner=_FUNCTION + 16.0, length=2.0 * op.k + 3.0 * op.n)


_FORWARD: dict[OperatorClass, Callable[[Operator], Roundings]] = {
    OperatorClass.FUSED_ATTENTION: _fused_forward,
    OperatorClass.SOFTMAX: lambda op: Roundings(stored=1.0, inner=_FUNCTION + 4.0, length=op.n),
    # Mean, variance, root, two products; images that scale in the job's format round three times.
    OperatorClass.NORM: lambda op: Roundings(stored=3.0, inner=_FUNCTION + 4.0, length=op.n),
    # With a gate: its activation, then the product.
    OperatorClass.ACTIVATION: lambda op: Roundings(stored=2.0, inner=_FUNCTION + 4.0),
    OperatorClass.ADDITION: lambda op: Roundings(stored=1.0),
    OperatorClass.ROTATION: lambda op: Roundings(stored=3.0),
    OperatorClass.EMBEDDING: lambda op: Roundings(stored=1.0),
    # The logarithm of a probability, its mean over the tokens.
    OperatorClass.LOSS: lambda op: Roundings(
        stored=2.0, inner=2.0 * _FUNCTION + 4.0, length=op.n + op.m
    ),
}
_BACKWARD: dict[OperatorClass, Callable[[Operator], Roundings]] = {
    OperatorClass.FUSED_ATTENTION: _fused_backward,
    OperatorClass.SOFTMAX: lambda op: Roundings(stored=2.0, inner=4.0, length=op.n),
    # The longer of the sums over a row (for the input) and over tokens (for the weights).
    OperatorClass.NORM: lambda op: Roundings(
        stored=3.0, inner=2.0 * _FUNCTION + 8.0, length=2.0 * max(op.n, op.m)
    ),
    OperatorClass.ACTIVATION: lambda op: Roundings(stored=2.0, inner=2.0 * _FUNCTION + 8.0),
    OperatorClass.ADDITION: lambda op: Roundings(stored=1.0),
    OperatorClass.ROTATION: lambda op: Roundings(stored=3.0),
    # A stored logarithm is about ln n, and its rounding is relative to that.
    OperatorClass.LOSS: lambda op: Roundings(
        stored=2.0 + math.log(op.n), inner=2.0 * _FUNCTION + 4.0 + math.log(op.n), length=op.n
    ),
}

CHECKED = frozenset({*WITH_WEIGHTS, OperatorClass.ATTENTION_SCORE, *_FORWARD}) | {
    OperatorClass.ATTENTION_CONTEXT
}
"""Operators whose result is not random, as a dropout's is."""


def rotary_error(sequence_length: int, base: float) -> Roundings:
    """What tables of rotary angles in float32 add to a layer.

    An angle p base^-e is rounded relative to itself (the power, the product), which is an absolute
    error of its sine and cosine; its RMS over positions p below s and even e in [0, 1) is s times
    sqrt(1/3) sqrt(1 / (2 ln base)).
    """
    return Roundings(inner=(_FUNCTION + 1.0) * sequence_length / math.sqrt(6.0 * math.log(base)))


def token_sum(tokens: int) -> Roundings:
    """What the gradients of a norm's weights add: sums over tokens.

    torch's kernels for CPUs keep them in the weights' format (aten/src/ATen/native/cpu/
    layer_norm_kernel.cpp: buffers of the parameters' type, one per thread); accelerators sum in
    float32. A running sum of m terms of mean zero has the RMS sqrt(j) after j of them, each rounded
    to u of itself: sqrt(m / 2) u in all, relative to the whole sum's RMS.
    """
    return Roundings(stored=math.sqrt(tokens / 2.0))


def update_roundings(weights_over_update: float, peak: float) -> Roundings:
    """Of the change of float32 weights in one step.

    About a dozen operations of the rule (decay, two moments, two corrections, root, quotient,
    product), and two roundings of the weights themselves, which are relative to the weights
    (`peak`: their largest over their RMS) and not to the change.
    """
    return Roundings(inner=12.0 + 2.0 * weights_over_update, peak=peak)
