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
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.numerics import OWN_ROTARY_BASE
from hetplan.model.operators import WITH_WEIGHTS, Operator, OperatorClass

SCHEMA = "hetplan.numerics/1"

PROBES = 64
"""Places of every result whose values are kept, to compare kinds by; all of a smaller one."""

# Two machines drew the same inputs where their float64 references agree up to the order in which
# they sum: 2^-53 times the root of the longest sum, 1e9 elements, is 4e-12. Tolerances follow from
# the references, from their largest elements too.
SAME_REFERENCE, SAME_TOLERANCE = 1e-9, 1e-6

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

    def allowed(self, precision: Precision, *, elements: int, peak: float, rms: float) -> Allowed:
        """The bound for a result of this many elements, with the peak and RMS of its reference."""
        u = _UNIT_ROUNDOFFS[precision]
        w = min(u, _UNIT_ROUNDOFFS[Precision.FLOAT32])
        relative = self.stored * (u + _SUBNORMAL_ERRORS[precision] / rms) + self.inner * w
        summed = math.sqrt(self.length) * w
        chance = math.sqrt(2.0 * math.log(2.0 * elements / FAILURE))
        largest = max(peak, self.peak, chance) * relative + chance * summed
        return Allowed(rms=relative + summed, largest=largest)


def layer_roundings(
    tensor: str, operators: Sequence[Operator], *, tokens: int, rotary_positions: int
) -> Roundings:
    """Of the result `forward` or `gradient of ...` of a layer of these operators.

    An operator stores its weights' scale, its result, and partial results of a sum that is split
    over cores; a loss stores logarithms of probabilities, about ln n, too. An elementary function
    in float32 rounds 4 times (CUDA C++ Programming Guide: expf, erff and rsqrtf are within 2 units
    in the last place); no operator has more than three and a few products. Forward values enter
    every gradient.

    A weight's gradient is summed over tokens, by torch's CPU kernels for norms and embeddings in
    the job's format: a running sum of m terms of mean zero has the RMS sqrt(j) after j of them,
    each rounded to u of itself, at most sqrt(m) u in all, relative to the whole sum's RMS.

    Tables of rotary angles are in float32: an angle p base^-e is rounded relative to itself (the
    power, the product), which is an absolute error of its sine and cosine; its RMS over
    `rotary_positions` s (0: the model has no rotary angles), p below s and even e in [0, 1), is s
    times sqrt(1/3) sqrt(1 / (2 ln base)).
    """
    stored = inner = length = 0.0
    if rotary_positions:
        inner = 5.0 * rotary_positions / math.sqrt(6.0 * math.log(OWN_ROTARY_BASE))
    backward = tensor != "forward"
    for op in operators:
        product = op.operator in _PRODUCTS
        logarithm = math.log(op.n) if op.operator is OperatorClass.LOSS else 0.0
        stored += op.count * (7.0 if backward else 3.0)
        inner += 0.0 if product else op.count * (32.0 if backward else 12.0)
        stored += logarithm if backward else 0.0
        inner += logarithm if backward else 0.0
        length += op.count * (op.k if product else op.k + 2.0 * op.n + op.m)
        if backward:
            length += op.count * (2.0 * op.k + 3.0 * max(op.m, op.n))
    if backward and tensor != INPUT_GRADIENT:
        stored += math.sqrt(tokens)
    return Roundings(stored=stored, inner=inner, length=length)


INPUT_GRADIENT = "gradient of input"
_PRODUCTS = (*WITH_WEIGHTS, OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT)


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
        """Identifies the result in every kind."""
        return self.operator, self.what, self.tp, self.tensor

    @property
    def share(self) -> float:
        """Fraction of what is allowed that is used; above 1: too far from the reference."""
        return max(
            self.rms_deviation / self.allowed.rms, self.largest_deviation / self.allowed.largest
        )

    @property
    def damage(self) -> str:
        """Why the result cannot be compared; empty: it can."""
        figures = (self.reference_rms, self.largest_deviation, self.rms_deviation)
        if not all(0 <= value < math.inf for value in figures):
            return f"deviations and RMS are finite numbers, at least 0, not {figures}"
        count = min(PROBES, math.prod(self.shape))
        if len(self.probes) != count or not all(map(math.isfinite, self.probes)):
            return f"a result with the shape {list(self.shape)} has {count} finite probes"
        return ""

    def __str__(self) -> str:
        return f"{self.operator} ({self.what}, tp {self.tp}, {self.tensor})"


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

    @property
    def by_operator(self) -> dict[str, list[NumericsResult]]:
        """Results of each operator, in the order of computation, the worst first."""
        groups: dict[str, list[NumericsResult]] = {}
        for result in sorted(self.results, key=lambda result: -result.share):
            groups.setdefault(result.operator, []).append(result)
        order = dict.fromkeys(result.operator for result in self.results)
        return {operator: groups[operator] for operator in order}


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
    """The results of another machine; an InputError where they are of another setup or damaged."""
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
    faults += [
        document.fault(
            ("kinds", k, "results", r), f"{result.damage}: write the file again with --out"
        )
        for k, kind in enumerate(numerics.kinds)
        for r, result in enumerate(kind.results)
        if result.damage
    ]
    if faults:
        raise InputError(*faults)
    return numerics


def merge_numerics(own: Numerics, others: Sequence[tuple[Path, Numerics]]) -> Numerics:
    """This machine's results and those of others.

    An InputError where they do not belong together: a kind twice, references of different inputs,
    or different tolerances.
    """
    kinds = list(own.kinds)
    known = {result.key: result for kind in own.kinds for result in kind.results}
    for path, other in others:
        for kind in other.kinds:
            if any(kind.kind == earlier.kind for earlier in kinds):
                message = f"has results of {kind.kind}, as another file or this machine has"
                raise InputError(Fault(file=str(path), message=f"{message}; leave one out"))
            for result in kind.results:
                earlier = known.setdefault(result.key, result)
                if not _same_work(result, earlier):
                    message = (
                        f"{result}: shape {result.shape}, reference {result.reference_rms!r}, "
                        f"{result.allowed}; elsewhere {earlier.shape}, {earlier.reference_rms!r}, "
                        f"{earlier.allowed}: the inputs differ; use one version of torch and of "
                        "hetplan on all machines"
                    )
                    raise InputError(Fault(file=str(path), message=message))
            kinds.append(kind)
    return Numerics(hetplan_version=own.hetplan_version, setup=own.setup, kinds=tuple(kinds))


def _same_work(one: NumericsResult, other: NumericsResult) -> bool:
    return (
        one.shape == other.shape
        and math.isclose(one.reference_rms, other.reference_rms, rel_tol=SAME_REFERENCE)
        and math.isclose(one.allowed.rms, other.allowed.rms, rel_tol=SAME_TOLERANCE)
        and math.isclose(one.allowed.largest, other.allowed.largest, rel_tol=SAME_TOLERANCE)
    )


def numerics_faults(
    numerics: Numerics, work: Sequence[tuple[str, str, int]] = ()
) -> tuple[str, ...]:
    """Why the kinds must not be mixed, one line each; empty: they may be.

    `work` is (operator, what, tp) of everything that a whole check has.
    """
    tensors = {result.key for kind in numerics.kinds for result in kind.results}
    return (
        *(line for kind in numerics.kinds for line in _kind_faults(kind, work, tensors)),
        *(
            line
            for one, other in combinations(numerics.kinds, 2)
            for line in _pair_faults(one, other)
        ),
    )


def _kind_faults(
    kind: KindNumerics,
    work: Sequence[tuple[str, str, int]],
    tensors: set[tuple[str, str, int, str]],
) -> Iterator[str]:
    """What the kind refused, what is missing, and its worst result of each operator if too far."""
    refused = {refusal.operator for refusal in kind.refused}
    for refusal in kind.refused:
        yield f"{kind.kind}: {refusal.operator} ({refusal.what}): {refusal.message}"
    keys = {result.key for result in kind.results}
    missing = {key[:3] for key in tensors - keys} | (set(work) - {key[:3] for key in keys})
    for operator, what, tp in sorted(missing):
        if operator not in refused:
            yield f"{kind.kind}: no result of {operator} ({what}, tp {tp}), or not all"
    for worst, *_ in kind.by_operator.values():
        if worst.share > 1.0:
            yield (
                f"{kind.kind}: {worst} deviates by rms {worst.rms_deviation:.1e} (allowed "
                f"{worst.allowed.rms:.1e}), largest {worst.largest_deviation:.1e} (allowed "
                f"{worst.allowed.largest:.1e})"
            )


def _pair_faults(one: KindNumerics, other: KindNumerics) -> Iterator[str]:
    """The worst pair of results of every operator, where they are too far apart."""
    theirs = {result.key: result for result in other.results}
    for results in one.by_operator.values():
        pairs = [(result, theirs[result.key]) for result in results if result.key in theirs]
        worst, mine = max(
            ((_apart(*pair), pair[0]) for pair in pairs),
            key=lambda entry: entry[0],
            default=(0.0, results[0]),
        )
        if worst > 1.0:
            yield (
                f"{one.kind} and {other.kind}: {mine} differs by {worst:.3g} times what both may "
                "deviate from the reference"
            )


def _apart(one: NumericsResult, other: NumericsResult) -> float:
    """Largest difference of the probes over what both results are allowed."""
    largest = max((abs(a - b) for a, b in zip(one.probes, other.probes, strict=True)), default=0.0)
    return largest / (one.reference_rms or 1.0) / (one.allowed.largest + other.allowed.largest)
