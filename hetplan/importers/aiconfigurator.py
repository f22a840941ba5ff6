"""AIConfigurator's tables of products and collectives (gemm_perf.txt, nccl_perf.txt) to samples.

CSV with a header, one row per shape; latencies are milliseconds. Rows of products with a `power`
ran for 0.3 to 1 s; the others are bursts of 6 runs, faster than a device at its power limit keeps
up. Times of narrow formats hold the quantising of the activations. `message_size` of collectives
counts elements (collector/collect_nccl.py).
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.errors import Fault
from hetplan.importers.lines import fault_at, finite_number, refuse_all, shown, whole_number
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass
from hetplan.profiling.samples import LinkOperation, LinkSample, OperatorPhase, OperatorSample

_PRODUCTS = ("gemm_dtype", "m", "n", "k", "latency")
_COLLECTIVES = ("nccl_dtype", "num_gpus", "message_size", "op_name", "latency")
_POINTER = "version https://git-lfs"
_FORMATS: Mapping[str, str] = {
    **{each.value: each.value for each in (Precision.BFLOAT16, Precision.FLOAT16)},
    "fp8": ProductFormat.FLOAT8.value,
    "nvfp4": ProductFormat.NVFP4.value,
}
_ELEMENT_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int8": 1}
_OPERATIONS = {
    "all_reduce": LinkOperation.ALL_REDUCE,
    "all_gather": LinkOperation.ALL_GATHER,
    "reduce_scatter": LinkOperation.REDUCE_SCATTER,
    "alltoall": LinkOperation.ALL_TO_ALL,
    "all_to_all": LinkOperation.ALL_TO_ALL,
}
_BURST_RUNS, _SUSTAINED_SECONDS = 6, 0.5
_LONGEST_SECONDS = 3600.0
BURST_NOTE = (
    "products without a power were measured in bursts, faster than training keeps up on devices "
    "that reach their power limit"
)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    cells: Mapping[str, str]


def detect(text: str) -> bool:
    """Whether the first line is the header of one of the tables, or a pointer to such a file."""
    first = text.removeprefix("\ufeff").split("\n", 1)[0]
    names = {name.strip() for name in first.split(",")}
    if first.startswith(_POINTER):
        return True
    return names >= set(_PRODUCTS) or names >= set(_COLLECTIVES)


def parse(text: str, context: ImportContext) -> Imported:
    """The samples; one InputError with every row that cannot be read."""
    text = text.removeprefix("\ufeff")
    if text.startswith(_POINTER):
        message = "this is git's pointer to a file that was not fetched: run `git lfs pull`"
        raise fault_at(context.file, 1, message)
    rows = list(_rows(text, context.file))
    names = set(rows[0].cells) if rows else set()
    if names >= set(_PRODUCTS):
        return _products(rows, context)
    if names >= set(_COLLECTIVES):
        return _collectives(rows, context)
    wanted = " or ".join(", ".join(columns) for columns in (_PRODUCTS, _COLLECTIVES))
    raise fault_at(context.file, 1, f"columns and at least one row are expected: {wanted}")


def _rows(text: str, file: str) -> Iterator[_Row]:
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in next(reader, [])]
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                message = f"found {len(cells)} columns where the header has {len(header)}"
                raise fault_at(file, reader.line_num, message)
            named = zip(header, (cell.strip() for cell in cells), strict=True)
            yield _Row(reader.line_num, dict(named))
    except csv.Error as error:
        raise fault_at(file, 1, f"is no CSV: {str(error)[:80]}") from error


def _products(rows: Sequence[_Row], context: ImportContext) -> Imported:
    faults: list[Fault] = []
    skipped: Counter[str] = Counter()
    newest: dict[tuple[object, ...], tuple[tuple[int, ...], OperatorSample]] = {}
    older, bursts = 0, False
    for row in rows:
        name = row.cells["gemm_dtype"].lower()
        if name not in _FORMATS:
            skipped[f"gemm_dtype {shown(name)}, of which no plan makes use"] += 1
            continue
        sizes = [_size(row, column, context, faults) for column in ("m", "n", "k")]
        seconds = _seconds(row, context, faults)
        if faults:
            continue
        sustained = bool(row.cells.get("power")) and row.cells["power"] not in ("0", "0.0", "nan")
        bursts |= not sustained
        runs = max(1, round(_SUSTAINED_SECONDS / seconds)) if sustained else _BURST_RUNS
        sample = _product(row, _FORMATS[name], sizes, seconds, runs)
        version = _version(row.cells.get("version", ""))
        before = newest.get(sample.shape)
        older += before is not None
        if before is None or version > before[0]:
            newest[sample.shape] = version, sample
    refuse_all(faults)
    devices = sorted({sample.device for _, sample in newest.values()} - {""})
    if len(devices) > 1:
        names = ", ".join(shown(each) for each in devices[:4])
        raise fault_at(context.file, 1, f"rows of several devices, {names}: keep a file for each")
    notes = [BURST_NOTE] if bursts else []
    if older:
        notes.append(f"{older} rows of older versions, or measured twice, are passed over")
    return Imported(
        kind="aiconfigurator",
        device_name=devices[0] if devices else "",
        operator_samples=tuple(sample for _, sample in newest.values()),
        notes=tuple(notes),
        skipped=tuple(f"{count} rows: {reason}" for reason, count in skipped.items()),
    )


def _product(
    row: _Row, precision: str, sizes: Sequence[int], seconds: float, runs: int
) -> OperatorSample:
    wide = precision if precision == Precision.FLOAT16 else Precision.BFLOAT16.value
    return OperatorSample(
        device=row.cells.get("device", ""),
        operator=OperatorClass.MATRIX_PRODUCT.value,
        phase=OperatorPhase.FORWARD.value,
        precision=precision,
        output_precision=wide,
        batch=1,
        m=sizes[0],
        n=sizes[1],
        k=sizes[2],
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=runs,
        outliers=0,
    )


def _collectives(rows: Sequence[_Row], context: ImportContext) -> Imported:
    faults: list[Fault] = []
    skipped: Counter[str] = Counter()
    samples: dict[tuple[object, ...], LinkSample] = {}
    for row in rows:
        operation = _OPERATIONS.get(row.cells["op_name"].lower())
        each = _ELEMENT_BYTES.get(row.cells["nccl_dtype"].lower())
        if operation is None or each is None:
            name = f"{row.cells['op_name']} of {row.cells['nccl_dtype']}"
            skipped[f"{shown(name)} is no collective of a known format"] += 1
            continue
        ranks = _size(row, "num_gpus", context, faults)
        elements = _size(row, "message_size", context, faults)
        seconds = _seconds(row, context, faults)
        if faults or ranks < 2:
            continue
        key = (operation, ranks, elements * each)
        samples[key] = LinkSample(
            link=context.link or "",
            operation=operation.value,
            backend="nccl",
            group_size=ranks,
            message_bytes=elements * each,
            median_seconds=seconds,
            p10_seconds=seconds,
            p90_seconds=seconds,
            repeats=1,
            outliers=0,
        )
    refuse_all(faults)
    return Imported(
        kind="aiconfigurator",
        links=tuple(samples.values()),
        notes=("one time per size, whose spread is not said",) if samples else (),
        skipped=tuple(f"{count} rows: {reason}" for reason, count in skipped.items()),
    )


def _size(row: _Row, column: str, context: ImportContext, faults: list[Fault]) -> int:
    number = whole_number(row.cells[column])
    if number is None or not 1 <= number < 2**40:
        message = f"found {shown(row.cells[column])}; write a whole number of at least 1"
        faults.append(Fault(file=context.file, line=row.line, field=column, message=message))
        return 1
    return number


def _seconds(row: _Row, context: ImportContext, faults: list[Fault]) -> float:
    milliseconds = finite_number(row.cells["latency"])
    seconds = (milliseconds or 0.0) * 1e-3
    if not 1e-9 <= seconds <= _LONGEST_SECONDS:
        message = (
            f"found {shown(row.cells['latency'])}; a latency is milliseconds above 0: measure the "
            "row again, or remove it"
        )
        faults.append(Fault(file=context.file, line=row.line, field="latency", message=message))
        return 1.0
    return seconds


def _version(text: str) -> tuple[int, ...]:
    parts = "".join(each if each.isdecimal() and each.isascii() else " " for each in text).split()
    return tuple(int(part[:9]) for part in parts[:6])
