"""Whether device kinds compute the same: their results, the file of them, and the verdict.

A deviation is relative to the root mean square (RMS) of the float64 reference: of a result y with
reference r, max |y - r| / rms(r) and rms(y - r) / rms(r).

A kind is refused where a result is further from its reference than its number format explains, or
where it does not compute something. Two kinds are refused where they are further from each other
than both together may be from the reference. `hetplan.launchers.numerics_work` computes the
results.

Rounding errors are taken as independent, of mean zero and at most the unit roundoff u each. A sum
of n products then deviates by about sqrt(n) u, and by more than lambda sqrt(n) u with a probability
below 2 exp(-lambda^2 / 2): Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815, section 2; for
terms of mean zero, as here, relative to the result's own RMS: 42 (2020), A3427. Products of 16-bit
numbers are summed in float32 and rounded once (Blanchard et al., 42 (2020), C124). So, with u of
the job's format, w of float32 (or of the job's where that is wider), and the `Roundings` of all
operators of the layer together:

    rms     <=  stored u + (inner + sqrt(length)) w
    largest <=  max(peak, lambda) (stored u + inner w) + lambda sqrt(length) w

peak is the reference's largest value over its RMS, and lambda makes the chance that any of N
elements of a correct result exceeds the bound `FAILURE`: lambda = sqrt(2 ln(2 N / FAILURE)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.numerics import OWN_ROTARY_BASE
from hetplan.model.operators import WITH_WEIGHTS, Operator, OperatorClass

SCHEMA = "hetplan.numerics/1"

PROBES = 64
"""Places of every result whose values are kept, to compare kinds by; all of a smaller one."""

# Two machines drew the same inputs where their float64 references agree up to the order in which
# they sum: 2^-53 times the root of the longest sum, 1e9 elements, is 4e-12.
SAME_REFERENCE = 1e-9
SAME_TOLERANCE = 1e-6
"""Tolerances follow from the references, from their largest elements too."""


FAILURE = 1e-6
"""Chance that a correct result is refused; a check has some hundred results."""

# Unit roundoff 2^-p of p significant bits (IEEE 754-2019, table 3.5; bfloat16: 8 bits), and half
# the distance of subnormal numbers, which is lost of a result near zero.
_UNIT_ROUNDOFFS = {
    Precision.FLOAT32: 2.0**-24,
    Precision.FLOAT16: 2.0**-11,
    Precision.BFLOAT16: 2.0**-8,
}
_SUBNORMAL_ERRORS = {
    Precision.FLOAT32: 2.0**-150,
    Precision.FLOAT16: 2.0**-25,
    Precision.BFLOAT16: 2.0**-134,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """How far a result may be from its reference, in the reference's RMS."""

    rms: float
    largest: float

    def __post_init__(self) -> None:
        if not (self.rms > 0 and self.largest > 0):
            raise InputError(
                f"allowed rms {self.rms}, largest {self.largest}; every format rounds, so both are "
                "above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """What happens to one element of a result on its way; first-order errors add up."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsResult:
    """One tensor that a kind computed, beside its reference."""

    operator: str
    """`embedding layer`, `transformer layer`, `head layer` or `optimizer`."""
    what: str
    """`whole` for a layer, the update rule for the optimizer."""
    tp: int
    """Slices that the layer is cut into."""
    tensor: str
    """Which result, as in `forward` or `gradient of keys`."""
    shape: tuple[int, ...]
    reference_rms: float
    largest_deviation: float
    rms_deviation: float
    allowed: Allowed
    probes: tuple[float, ...]
    """Values at places that are the same for every kind."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What the results of two kinds are matched by."""
        return self.operator, self.what, self.tp, self.tensor

    @property
    def share(self) -> float:
        """Part of what is allowed that is used; above 1: too far from the reference, infinite
        where a deviation is no number.
        """
        shares = (
            self.rms_deviation / self.allowed.rms,
            self.largest_deviation / self.allowed.largest,
        )
        return max(math.inf if math.isnan(each) else each for each in shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What a kind does not compute, or computes to no finite number."""

    operator: str
    what: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindNumerics:
    """Every result of one device kind."""

    kind: str
    device_name: str
    driver: str
    torch_version: str
    results: tuple[NumericsResult, ...]
    refused: tuple[Refused, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsSetup:
    """What was computed: results of equal setups can be compared."""

    model: str
    precision: Precision
    optimizer: Optimizer
    seed: int
    tensor_parallel: tuple[int, ...]
    """Degrees of the plan, each with slices of its own."""
    microbatch_size: int
    sequence_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The results of one machine, or of several put together."""

    hetplan_version: str
    setup: NumericsSetup
    kinds: tuple[KindNumerics, ...]


def save_numerics(numerics: Numerics, path: Path) -> None:
    """Write the results; the file is whole or, after a fault, as it was before."""
    write_atomically(path, encode(numerics, schema=SCHEMA))


def load_numerics(path: Path, setup: NumericsSetup) -> Numerics:
    """The results of another machine; an InputError where they are of another setup, or hold what
    no check writes.
    """
    document = read_document(path)
    numerics = decode(document, Numerics, schema=SCHEMA)
    faults = [
        document.fault(
            ("setup", name),
            f"{getattr(numerics.setup, name)}; this check has {getattr(setup, name)}: write the "
            "file from the same plan, with the same --tokens",
        )
        for name in NumericsSetup.__dataclass_fields__
        if getattr(numerics.setup, name) != getattr(setup, name)
    ]
    faults += _damage(document, numerics)
    if faults:
        raise InputError(*faults)
    return numerics


def _damage(document: Document, numerics: Numerics) -> Iterator[Fault]:
    """Results that could pass for right ones because they cannot be compared."""
    for k, kind in enumerate(numerics.kinds):
        for r, result in enumerate(kind.results):
            place = ("kinds", k, "results", r)
            for name in ("reference_rms", "largest_deviation", "rms_deviation"):
                value = getattr(result, name)
                if not 0 <= value < math.inf:
                    message = f"{value}; it is a finite number, at least 0"
                    yield document.fault((*place, name), f"{message}: {_AGAIN}")
            probes = min(PROBES, math.prod(result.shape))
            if min(result.shape, default=1) < 1 or len(result.probes) != probes:
                yield document.fault(
                    (*place, "probes"),
                    f"{len(result.probes)} of a result with the shape {list(result.shape)}, which "
                    f"has {max(probes, 0)}: {_AGAIN}",
                )
            elif not all(map(math.isfinite, result.probes)):
                yield document.fault((*place, "probes"), f"not all are finite numbers: {_AGAIN}")


_AGAIN = "write the file again with --out"


def merge_numerics(own: Numerics, others: Sequence[tuple[Path, Numerics]]) -> Numerics:
    """This machine's results and those of others; an InputError where they do not belong together:
    a kind twice, references of different inputs, or different tolerances.
    """
    kinds = list(own.kinds)
    references = {result.key: result for answered in own.kinds for result in answered.results}
    for path, other in others:
        for kind in other.kinds:
            if any(kind.kind == known.kind for known in kinds):
                message = f"has results of {kind.kind}, as another file or this machine has"
                raise InputError(Fault(file=str(path), message=f"{message}; leave one out"))
            for result in kind.results:
                message = _unlike(result, references.setdefault(result.key, result))
                if message:
                    raise InputError(Fault(file=str(path), message=message))
            kinds.append(kind)
    return Numerics(hetplan_version=own.hetplan_version, setup=own.setup, kinds=tuple(kinds))


def _unlike(result: NumericsResult, known: NumericsResult) -> str:
    """Why two results are not of the same work; empty: they are."""
    what = f"{result.operator} ({result.what}, {result.tensor})"
    versions = "use one version of torch and of hetplan on all machines"
    if result.shape != known.shape:
        return f"{what} has the shape {result.shape}, elsewhere {known.shape}; {versions}"
    if abs(known.reference_rms - result.reference_rms) > SAME_REFERENCE * known.reference_rms:
        return (
            f"the reference of {what} is {result.reference_rms!r}, elsewhere "
            f"{known.reference_rms!r}: the inputs differ; {versions}"
        )
    for name in ("rms", "largest"):
        own, other = getattr(result.allowed, name), getattr(known.allowed, name)
        if not math.isclose(own, other, rel_tol=SAME_TOLERANCE):
            return f"{what} is allowed {name} {own!r}, elsewhere {other!r}; {versions}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDeviation:
    """The result of one operator and kind that uses most of what is allowed."""

    operator: str
    worst: NumericsResult
    results: int
    """Results of the operator that were compared."""


def deviations(kind: KindNumerics) -> tuple[OperatorDeviation, ...]:
    """One per operator, in the order of computation."""
    by_operator: dict[str, list[NumericsResult]] = {}
    for result in kind.results:
        by_operator.setdefault(result.operator, []).append(result)
    return tuple(
        OperatorDeviation(
            operator=operator,
            worst=max(results, key=lambda result: result.share),
            results=len(results),
        )
        for operator, results in by_operator.items()
    )


def numerics_faults(
    numerics: Numerics, work: Sequence[tuple[str, str, int]] = ()
) -> tuple[str, ...]:
    """Why the kinds must not be mixed, one line each; empty: they may be.

    `work` is (operator, what, tp) of everything that a whole check has.
    """
    return (
        *(line for kind in numerics.kinds for line in _missing_work(kind, work)),
        *(line for kind in numerics.kinds for line in _kind_faults(kind)),
        *(
            line
            for one, other in combinations(numerics.kinds, 2)
            for line in _pair_faults(one, other)
        ),
    )


def _missing_work(kind: KindNumerics, work: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    done = {(result.operator, result.what, result.tp) for result in kind.results}
    refused = {(each.operator, each.what) for each in kind.refused}
    for operator, what, tp in work:
        if (operator, what, tp) not in done and (operator, what) not in refused:
            yield f"{kind.kind}: no result of {operator} ({what}, tp {tp})"


def _kind_faults(kind: KindNumerics) -> Iterator[str]:
    for refused in kind.refused:
        yield f"{kind.kind}: {refused.operator} ({refused.what}): {refused.message}"
    for deviation in deviations(kind):
        worst = deviation.worst
        if not worst.share <= 1.0:
            yield (
                f"{kind.kind}: {_place(worst)} deviates by rms {worst.rms_deviation:.1e} (allowed "
                f"{worst.allowed.rms:.1e}), largest {worst.largest_deviation:.1e} (allowed "
                f"{worst.allowed.largest:.1e})"
            )


def _pair_faults(one: KindNumerics, other: KindNumerics) -> Iterator[str]:
    """The worst pair of results of every operator that are too far apart, or have no partner."""
    theirs = {result.key: result for result in other.results}
    worst: dict[str, tuple[float, str]] = {}
    for own in one.results:
        result = theirs.pop(own.key, None)
        if result is None:
            worst.setdefault(own.operator, (math.inf, _computed_once(own, one, other)))
            continue
        apart = _distance(own, result)
        both = own.allowed.largest + result.allowed.largest
        if not apart <= both and apart / both > worst.get(own.operator, (0.0, ""))[0]:
            line = (
                f"{one.kind} and {other.kind}: {_place(own)} differs by {apart:.1e} of the "
                f"reference's RMS, allowed {both:.1e}"
            )
            worst[own.operator] = (apart / both, line)
    for result in theirs.values():
        worst.setdefault(result.operator, (math.inf, _computed_once(result, other, one)))
    yield from (line for _, line in worst.values() if line)


def _computed_once(result: NumericsResult, by: KindNumerics, other: KindNumerics) -> str:
    """Empty where the other kind has refused the operator, which its own fault tells."""
    if any(refused.operator == result.operator for refused in other.refused):
        return ""
    kinds = f"{by.kind} and {other.kind}"
    return f"{kinds}: {_place(result)} was computed by {by.kind} only"


def _distance(own: NumericsResult, other: NumericsResult) -> float:
    if len(own.probes) != len(other.probes):
        return math.inf
    pairs = zip(own.probes, other.probes, strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0) / (own.reference_rms or 1.0)


def _place(result: NumericsResult) -> str:
    return f"{result.operator} ({result.what}, tp {result.tp}, {result.tensor})"


# ---- how far a correct result may deviate


def allowed(
    roundings: Roundings, precision: Precision, *, elements: int, peak: float, rms: float
) -> Allowed:
    """The bound for a result of this many elements, with the peak and RMS of its reference."""
    u = _UNIT_ROUNDOFFS[precision]
    w = min(u, _UNIT_ROUNDOFFS[Precision.FLOAT32])
    relative = roundings.stored * (u + _SUBNORMAL_ERRORS[precision] / rms) + roundings.inner * w
    summed = math.sqrt(roundings.length) * w
    chance = math.sqrt(2.0 * math.log(2.0 * elements / FAILURE))
    largest = max(peak, roundings.peak, chance) * relative + chance * summed
    return Allowed(rms=relative + summed, largest=largest)


_PRODUCTS = (*WITH_WEIGHTS, OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT)


def forward_roundings(op: Operator) -> Roundings:
    """Of an operator's forward result.

    Stored are the weights' scale, the result, and partial results of a sum that is split over
    cores. An elementary function in float32 rounds 4 times (CUDA C++ Programming Guide: expf, erff
    and rsqrtf are within 2 units in the last place); no operator has more than three and a few
    products.
    """
    if op.operator in _PRODUCTS:
        return Roundings(stored=3.0, length=op.k)
    tokens = op.m if op.operator is OperatorClass.LOSS else 0.0
    return Roundings(stored=3.0, inner=12.0, length=op.k + 2.0 * op.n + tokens)


def backward_roundings(op: Operator, *, equal_tokens: int) -> Roundings:
    """Of each of an operator's gradients; `equal_tokens`: how often one token is looked up."""
    if op.operator in _PRODUCTS:
        return Roundings(stored=3.0, length=max(op.m, op.n, op.k))
    if op.operator is OperatorClass.EMBEDDING:
        # Rows of one token are added up in the table, in the job's format.
        return Roundings(stored=math.sqrt(equal_tokens))
    # A stored logarithm of a probability is about ln n, and its rounding is relative to that.
    logarithm = math.log(op.n) if op.operator is OperatorClass.LOSS else 0.0
    sums = 2.0 * op.k + 3.0 * max(op.m, op.n)
    return Roundings(stored=4.0 + logarithm, inner=20.0 + logarithm, length=sums)


def token_sum(tokens: int) -> Roundings:
    """What the gradients of a norm's weights add: sums over tokens.

    torch's kernels for CPUs keep them in the weights' format (aten/src/ATen/native/cpu/
    layer_norm_kernel.cpp). A running sum of m terms of mean zero has the RMS sqrt(j) after j of
    them, each rounded to u of itself: sqrt(m / 2) u in all, relative to the whole sum's RMS.
    """
    return Roundings(stored=math.sqrt(tokens / 2.0))


def rotary_error(sequence_length: int) -> Roundings:
    """What tables of rotary angles in float32 add to a layer.

    An angle p base^-e is rounded relative to itself (the power, the product), which is an absolute
    error of its sine and cosine; its RMS over positions p below s and even e in [0, 1) is s times
    sqrt(1/3) sqrt(1 / (2 ln base)).
    """
    base = OWN_ROTARY_BASE
    return Roundings(inner=5.0 * sequence_length / math.sqrt(6.0 * math.log(base)))
