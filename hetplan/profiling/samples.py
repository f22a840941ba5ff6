"""Samples of layers, operators and links, where they came from, and their CSV form.

A sample is one row of a CSV file, with columns named like the fields of the value; all rows of one
population (same device, driver, library versions, threads) are in one folder with its provenance.
Seconds are medians over `repeats` runs of which `outliers` lie more than three interquartile ranges
above the median; none is dropped.

Numbers are written by repr, which is exact. A reader names file, line and column of every fault.
Columns are only ever added, at the end: a file without the later ones (`LATER_COLUMNS`) is an
older form and is read with their defaults.
"""

from __future__ import annotations

import csv
import datetime
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, get_type_hints

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_bytes
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass

if TYPE_CHECKING:
    import pandas


Shape: TypeAlias = tuple[str | int, ...]
"""What samples of the same thing have in common: all columns but the device and the result."""


class Phase(StrEnum):
    """Part of a training step that a layer takes part in."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """Measured time of one phase of one layer on one tensor-parallel rank, communication apart."""

    device: str
    """Device kind."""
    architecture: str
    layer: str
    """A `LayerKind` value."""
    phase: str
    """A `Phase` value; an optimizer's name follows after a colon, as in `optimizer:adamw`."""
    precision: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sequence_length: int
    microbatch_size: int
    tp: int
    copies: int = 1
    """Layers that the phase ran over; optimizer rows also update several at once."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    steady: bool
    """Whether warm-up reached a steady time before its limit."""
    activation_bytes: float
    """Bytes of tensors that autograd kept for the backward pass (forward rows; 0 elsewhere)."""
    peak_memory_bytes: float
    """Most device memory allocated during the phase above what was allocated before it."""
    clock_hertz: float
    """Device clock during the measurement; 0 where the device does not tell."""
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""

    @property
    def shape(self) -> Shape:
        """What was measured: everything but the device and the result."""
        return _LAYER_SHAPE(self)


LAYER_SHAPE = (
    "architecture", "layer", "phase", "precision", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_kv_heads", "head_dim", "vocab_size", "sequence_length",
    "microbatch_size", "tp", "copies",
)  # fmt: skip
"""Columns of `LayerSample.shape`."""
_LAYER_SHAPE: Callable[[LayerSample], Shape] = attrgetter(*LAYER_SHAPE)


class OperatorPhase(StrEnum):
    """Which pass of one operator was measured.

    A product with weights has two backward products: frameworks and tools often publish one.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    """All of it, where the operator has one backward kernel or its two were measured together."""
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """Measured time of one pass of one operator (a kernel, or a few that always run together)."""

    device: str
    """Device kind."""
    operator: str
    """A `hetplan.model.operators.OperatorClass` value."""
    phase: str
    """An `OperatorPhase` value."""
    precision: str
    """Of its inputs; a `hetplan.job.spec.Precision` value, or of a product with weights a
    `ProductFormat`, whose time then holds the quantising of the activations that it reads."""
    output_precision: str
    """Of what it writes: gradients of weights are often float32."""
    batch: int
    """Products of one shape in one launch; 1 where nothing is batched."""
    m: int
    """Rows of the result; of an operator that is no product: tokens (rows)."""
    n: int
    """Columns of the result; of an operator that is no product: elements per token."""
    k: int
    """Summed over; 0 where the operator is no product."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    """1: one figure; p10 and p90 are then how far it may be off, not how runs scatter."""
    outliers: int
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""

    @property
    def shape(self) -> Shape:
        """What was measured: everything but the device and the result."""
        return _OPERATOR_SHAPE(self)


OPERATOR_SHAPE = ("operator", "phase", "precision", "output_precision", "batch", "m", "n", "k")
"""Columns of `OperatorSample.shape`."""
_OPERATOR_SHAPE: Callable[[OperatorSample], Shape] = attrgetter(*OPERATOR_SHAPE)


class LinkOperation(StrEnum):
    """What was measured on a link.

    `send_recv` has both sides posting together, `send_recv_late` the receiver well before.
    """

    SEND_RECV = "send_recv"
    SEND_RECV_LATE = "send_recv_late"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


SENDS = (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)
"""Messages from one device to another; their difference is the rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Measured time of one communication operation among `group_size` ranks."""

    link: str
    """Name under which cluster files refer to these samples."""
    operation: str
    """A `LinkOperation` value."""
    backend: str
    group_size: int
    message_bytes: int
    """Bytes of the full tensor: what all_reduce reduces, what all_gather ends with, what
    reduce_scatter starts with, what each rank starts with in all_to_all."""
    median_seconds: float
    """Time of the slowest rank from the last rank's start to its own end."""
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    measured_on: str = ""
    """ISO date of this row; empty: the date of its population."""
    nodes: int = 1
    """Nodes that the ranks stand in, equally many in each."""
    groups: int = 1
    """Groups of this shape that communicated at the same time on the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a population of samples was measured, and with what."""

    device: str
    device_name: str
    """What the driver or the operating system calls it."""
    backend: str
    """torch device type: `cpu`, `cuda` (ROCm too), ..."""
    measured_on: str
    """ISO date of the first sample."""
    hetplan_version: str
    torch_version: str
    driver: str
    """Driver and runtime versions as the backend reports them; the kernel release on a CPU."""
    threads: int
    paced: str
    """Empty, or how the device was slowed down on purpose."""
    together: int = 1
    """Processes of the machine that measured the same at the same time; 1 measured alone."""
    tool: str = "hetplan"
    """What measured: hetplan, or the program whose output was imported (nccl-tests, sailor)."""
    clocks: str = ""
    """Clock and power settings that somebody chose, as in `sm 1410 MHz locked, 300 W`; empty: as
    the device came, or not known."""
    command: str
    """The command line that measured it."""
    notes: str = ""

    @property
    def circumstances(self) -> tuple[str, ...]:
        """What a population has in common beside its device kind: times of others do not mix.

        Date, command, notes and hetplan's own version are no circumstances.
        """
        return (
            self.device_name,
            self.backend,
            self.torch_version,
            self.driver,
            str(self.threads),
            self.paced,
            # Only where they say something: populations from before these fields keep their names.
            *((f"{self.together} together",) if self.together > 1 else ()),
            *((f"by {self.tool}",) if self.tool != "hetplan" else ()),
            *((self.clocks,) if self.clocks else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSet:
    """Samples that belong together in one fit: everything a store holds, or a part of it."""

    layers: tuple[LayerSample, ...]
    links: tuple[LinkSample, ...]
    provenance: tuple[Provenance, ...]
    operators: tuple[OperatorSample, ...] = ()

    def to_pandas(self) -> dict[str, pandas.DataFrame]:
        """Tables `layers`, `links`, `operators` and `provenance`, one row per value."""
        import pandas

        return {
            field.name: pandas.DataFrame(
                map(asdict, getattr(self, field.name)),
                columns=[each.name for each in fields(_ROW_TYPES[field.name])],
            )
            for field in fields(self)
        }


_ROW_TYPES: Mapping[str, type] = {
    "layers": LayerSample,
    "links": LinkSample,
    "operators": OperatorSample,
    "provenance": Provenance,
}


AnySample: TypeAlias = LayerSample | LinkSample | OperatorSample
SampleType: TypeAlias = type[LayerSample] | type[LinkSample] | type[OperatorSample]
SHAPE_COLUMNS: Mapping[SampleType, tuple[str, ...]] = {
    LayerSample: LAYER_SHAPE,
    OperatorSample: OPERATOR_SHAPE,
}
SAMPLE_TYPES: tuple[SampleType, ...] = (LayerSample, LinkSample, OperatorSample)
"""Every kind of row that a store keeps."""
Sample = TypeVar("Sample", LayerSample, LinkSample, OperatorSample)

# No count, byte or second reaches it; a larger integer would overflow where it becomes a float.
_BEYOND = 1e300

# Spreadsheets begin a CSV file with it, to say that it is UTF-8.
_MARK = "\ufeff"

_LOGGER = logging.getLogger(__name__)
_BOOLEANS = {"true": True, "false": False}
_TIMES = ("median_seconds", "p10_seconds", "p90_seconds")
LATER_COLUMNS: Mapping[str, str | int] = {"measured_on": "", "nodes": 1, "groups": 1}
"""Columns that the first form of the files did not have, and what a row has there without them."""

# Counts of which there is at least one; the others may be zero.
_POSITIVE = (
    "repeats", "microbatch_size", "tp", "hidden_size", "sequence_length", "group_size", "nodes",
    "groups", "batch", "m", "n",
)  # fmt: skip

# Only rows of operators: a law is made per word of them, so a wrong one would be a law of its own.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "operator": tuple(OperatorClass),
    "phase": tuple(OperatorPhase),
    "precision": (*Precision, *ProductFormat),
    "output_precision": tuple(Precision),
}


def header(sample_type: SampleType) -> str:
    """The first line of the file, without a line break."""
    return ",".join(field.name for field in fields(sample_type))


def row(sample: AnySample) -> str:
    """The sample's line, without a line break."""
    values = (getattr(sample, field.name) for field in fields(sample))
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(_cell, values))
    if "\n" in text.getvalue() or "\r" in text.getvalue():
        raise InputError(f"a sample's text has a line break: {text.getvalue()!r}")
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFile(Generic[Sample]):
    """What a file of samples holds, and everything that is wrong with it."""

    samples: tuple[Sample, ...]
    """Every row that can be read."""
    faults: tuple[Fault, ...] = ()
    """Rows that cannot, each with its line and column, or what is wrong with the whole file."""
    torn: str = ""
    """The half line at the end that a kill left, or that somebody is writing now."""


def read_samples(path: Path, sample_type: type[Sample]) -> tuple[Sample, ...]:
    """Every sample of the file; an InputError that lists all faults.

    A last line without a line break was torn by a kill while it was written: it is dropped, with
    a warning in the log.
    """
    found = inspect_samples(path, sample_type)
    if found.faults:
        raise InputError(*found.faults)
    if found.torn:
        _LOGGER.warning("%s: a torn last line was dropped: %r", path, found.torn[:60])
    return found.samples


def inspect_samples(path: Path, sample_type: type[Sample]) -> SampleFile[Sample]:
    """Every sample of the file that can be read, and the faults of the rest."""
    try:
        data = read_bytes(path)
    except InputError as error:
        return SampleFile(samples=(), faults=error.faults)
    end = data.rfind(b"\n") + 1
    torn = data[end:].decode("utf-8", "backslashreplace")
    lines = data[:end].decode("utf-8", "surrogateescape").split("\n")[:-1]
    if not lines:
        fault = Fault(file=str(path), line=1, message="the header line is missing")
        return SampleFile(samples=(), faults=(fault,), torn=torn)
    names = _cells(lines[0].removeprefix(_MARK)) or []
    faults = list(header_faults(path, lines[0], sample_type))
    samples: list[Sample] = []
    # Every row is one line (a writer refuses others), so one spoilt line spoils itself only.
    for number, line in enumerate(lines[1:], start=2) if not faults else ():
        sample, wrong = parse_row(path, number, names, line, sample_type)
        faults += wrong
        if sample is not None:
            samples.append(sample)
    return SampleFile(samples=tuple(samples), faults=tuple(faults), torn=torn)


def header_faults(path: Path, line: str, sample_type: SampleType) -> tuple[Fault, ...]:
    """What is wrong with the first line of a file of samples."""
    names = _cells(line.removeprefix(_MARK))
    if names is None:
        found = [
            ("", f"the header cannot be read: {line[:40]!a}; samples are text, one row a line")
        ]
    else:
        wanted = [field.name for field in fields(sample_type)]
        required = [name for name in wanted if name not in LATER_COLUMNS]
        found = [(name, "the column is missing") for name in required if name not in names]
        unknown = f"unknown column; {', '.join(wanted)}"
        found += [(name[:60], unknown) for name in names if name not in wanted]
        if len(set(names)) != len(names):
            found.append(("", "a column appears twice"))
    return tuple(
        Fault(file=str(path), line=1, field=name, message=message) for name, message in found
    )


def parse_row(
    path: Path, number: int, names: list[str], line: str, sample_type: type[Sample]
) -> tuple[Sample | None, list[Fault]]:
    """The sample of one line under a header of these names, or what is wrong with it."""
    cells = _cells(line)
    wrong: list[tuple[str, str]] = []
    values: dict[str, Any] = dict(LATER_COLUMNS)
    if cells is None:
        wrong = [("", f"cannot be read as a row: {line[:40]!a}; remove the line or correct it")]
    elif len(cells) != len(names):
        message = f"found {len(cells)} columns where the header has {len(names)}; correct the line"
        wrong = [("", message)]
    else:
        texts = dict(zip(names, cells, strict=True))
        for name, type_ in _COLUMNS[sample_type]:
            if name in texts:
                values[name], message = _read_cell(name, texts[name], type_)
                message = message or _wrong_word(sample_type, name, values[name])
                wrong += [(name, message)] if message else []
    if wrong:
        return None, [
            Fault(file=str(path), line=number, field=name, message=message)
            for name, message in wrong
        ]
    return sample_type(**{name: values[name] for name, _ in _COLUMNS[sample_type]}), []


def _cells(line: str) -> list[str] | None:
    """The cells of one line; None where it is no text or no CSV."""
    if "\0" in line or any("\udc80" <= character <= "\udcff" for character in line):
        return None
    try:
        return next(csv.reader([line.rstrip("\r")], strict=True), [])
    except csv.Error:
        return None


# Looking the types up takes six times as long as reading a row.
_COLUMNS: Mapping[type, tuple[tuple[str, Callable[[str], object]], ...]] = {
    sample_type: tuple(get_type_hints(sample_type).items()) for sample_type in SAMPLE_TYPES
}


def _read_cell(name: str, text: str, type_: Callable[[str], object]) -> tuple[object, str]:
    """The value, and what is wrong with it (empty: nothing)."""
    if name == "measured_on":
        return text, "" if not text or _is_date(text) else f"found {text!r}; a date as 2026-11-20"
    if type_ is str:
        return text, "" if text else "found nothing; a name must stand here"
    if type_ is bool:
        return _BOOLEANS.get(text), "" if text in _BOOLEANS else f"found {text!r}; true or false"
    try:
        value = type_(text)
    except (ValueError, OverflowError):
        wanted = "a whole number" if type_ is int else "a number"
        return None, f"found {text!r}; {wanted} must stand here"
    if not isinstance(value, int | float) or not 0 <= value < _BEYOND:
        return None, f"found {text!r}; the number must be finite and not negative"
    if not value and name in (*_TIMES, *_POSITIVE):
        return None, f"found {text!r}; the number must be above 0"
    return value, ""


def _wrong_word(sample_type: SampleType, name: str, value: object) -> str:
    words = _WORDS.get(name) if sample_type is OperatorSample else None
    if words is None or value in words:
        return ""
    return f"found {str(value)[:60]!a}; it is one of {', '.join(words)}"


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
