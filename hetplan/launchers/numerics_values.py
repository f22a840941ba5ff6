"""What a check of device kinds' arithmetic gives, and how it is kept in a file.

A deviation is relative to the root mean square (RMS) of the float64 reference: of a result y with
reference r, max |y - r| / rms(r) and rms(y - r) / rms(r).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Optimizer, Precision

SCHEMA = "hetplan.numerics/1"

PROBES = 64
"""Places of every result whose values are kept, to compare kinds by; all of a smaller one."""

# Two machines drew the same inputs where their float64 references agree up to the order in which
# they sum: 2^-53 times the root of the longest sum, 1e9 elements, is 4e-12.
SAME_REFERENCE = 1e-9
SAME_TOLERANCE = 1e-6
"""Tolerances follow from the references, from their largest elements too."""


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
class NumericsResult:
    """One tensor that a kind computed, beside its reference."""

    operator: str
    """`hetplan.model.operators.OperatorClass` value, or `embedding layer`, `transformer layer`,
    `head layer`."""
    what: str
    """Where it stands in the model, as in `query-key-value projection`."""
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
    """What was computed: answers of equal setups can be compared."""

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
    """The answers of one machine, or of several put together."""

    hetplan_version: str
    setup: NumericsSetup
    kinds: tuple[KindNumerics, ...]


def save_numerics(numerics: Numerics, path: Path) -> None:
    """Write the answers; the file is whole or, after a fault, as it was before."""
    write_atomically(path, encode(numerics, schema=SCHEMA))


def load_numerics(path: Path, setup: NumericsSetup) -> Numerics:
    """The answers of another machine; an InputError where they are of another setup, or hold what
    no check writes.
    """
    document = read_document(path)
    numerics = decode(document, Numerics, schema=SCHEMA)
    faults = [
        document.fault(
            ("setup", name),
            f"{getattr(numerics.setup, name)}; this check has {getattr(setup, name)}: write the "
            "file from the same plan, with the same --numerics-tokens",
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


_AGAIN = "write the file again with --numerics-out"


def joined(own: Numerics, others: tuple[tuple[Path, Numerics], ...]) -> Numerics:
    """This machine's answers and those of others, a kind once; an InputError where they do not
    belong together: a kind twice, references of unlike inputs, or unlike tolerances.
    """
    kinds = list(own.kinds)
    references = {result.key: result for each in own.kinds for result in each.results}
    for path, other in others:
        for kind in other.kinds:
            if any(kind.kind == known.kind for known in kinds):
                message = f"has answers of {kind.kind}, as another file or this machine has"
                raise InputError(Fault(file=str(path), message=f"{message}; leave one out"))
            for result in kind.results:
                message = _unlike(result, references.setdefault(result.key, result))
                if message:
                    raise InputError(Fault(file=str(path), message=message))
            kinds.append(kind)
    return Numerics(hetplan_version=own.hetplan_version, setup=own.setup, kinds=tuple(kinds))


def _unlike(result: NumericsResult, known: NumericsResult) -> str:
    """Why two answers are not of the same work; empty: they are."""
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
