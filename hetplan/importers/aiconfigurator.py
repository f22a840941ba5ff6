"""AIConfigurator's tables of products and collectives (gemm_perf.txt, nccl_perf.txt) to samples.

CSV with a header, one row per shape; latencies are milliseconds. Rows of products with a `power`
ran for 0.3 to 1 s and are kept as they are. The others are bursts of 6 runs: they are slowed to
what a device at its power limit keeps up (`hetplan.profiling.bursts`). Times of narrow formats hold
the quantising of the activations. `message_size` of collectives counts elements
(collector/collect_nccl.py). Of rows of one shape those that ran long come first, then those of the
newest version. A fault names its line and column.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import TypeAlias
from zlib import crc32

from hetplan.cluster.catalogue import kind_called, load_catalogue, meant_kinds
from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, finite_number, refuse_all, shown, whole_number
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass
from hetplan.profiling.bursts import WITHOUT_LIMIT, kept_up, sustained_factor
from hetplan.profiling.samples import LinkOperation, LinkSample, OperatorPhase, OperatorSample

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gemm_dtype": ("gemm_dtype", "m", "n", "k", "latency"),
    "nccl_dtype": ("nccl_dtype", "num_gpus", "message_size", "op_name", "latency"),
}
"""What a table needs, by the column that tells which it is."""
_FILES = {"gemm_dtype": "gemm_perf.txt", "nccl_dtype": "nccl_perf.txt"}
_UNUSED: Mapping[str, str] = {
    "attn_dtype": "attention that serves from a cache, without a backward pass; training's differs",
    "moe_dtype": "permutation, products and activation of experts in one time, which no law splits",
}
"""Tables that are known and give no sample, and why."""
_COMMON = {"framework", "version", "device", "op_name"}
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
_SUSTAINED_SECONDS = 0.5
"""Runs with power take 0.3 to 1 s."""
_OVER_PEAK = 1.25
"""Clocks above the nominal one and rounding of datasheets give a tenth; more is a broken row."""
_LEAST_TOKENS = 128
"""Rows below are products of decoding; no microbatch of training is so small."""
_MOST_ROWS = 8000
"""Of one format: the fit compares every two rows, and these take it 2.5 GB and 10 s."""
_VERSION = "as AIConfigurator wrote it in August 2026, commit 095f58a; latency in milliseconds"
_OLDER = "of an older version, or measured twice; --version chooses"
_BESIDE_SUSTAINED = "burst; a sustained row of the same shape is kept"
_Ranked: TypeAlias = tuple[tuple[object, ...], OperatorSample]
"""What decides between rows of one shape, and the row."""


def detect(text: str) -> bool:
    """Whether the first line is the header of one of the tables, or a pointer to such a file."""
    first = text.removeprefix("\ufeff").split("\n", 1)[0]
    names = {name.strip() for name in first.split(",")}
    known = names & {*_COLUMNS, *_UNUSED} or names >= _COMMON
    return first.startswith(_POINTER) or bool(known)


def parse(text: str, context: ImportContext) -> Imported:
    """The samples; one InputError with every row that cannot be read."""
    text = text.removeprefix("\ufeff")
    if text.startswith(_POINTER):
        message = "this is git's pointer to a file that was not fetched: run `git lfs pull`"
        raise fault_at(context.file, 1, message)
    table = _table(header_of(text, context.file), context.file)
    rows = list(rows_of(text, context.file))
    if not rows:
        raise fault_at(context.file, 1, "at least one row is expected after the header")
    if table in _UNUSED:
        return Imported(kind="aiconfigurator", skipped=(f"{len(rows)} rows: {_UNUSED[table]}",))
    rows = asked(rows, context)
    only_one("device", rows, context, "keep a file for each")
    if context.framework is None and table == "gemm_dtype":
        only_one("framework", rows, context, "choose one with --framework")
    return (_products if table == "gemm_dtype" else _collectives)(rows, context)


def _table(header: Sequence[str], file: str) -> str:
    """The column that tells which table it is; an InputError where it lacks columns."""
    table = next((name for name in (*_COLUMNS, *_UNUSED) if name in header), "")
    found = f"found {', '.join(header)[:200]!a}"
    needs = {name: f"{_FILES[name]} needs {', '.join(_COLUMNS[name])}" for name in _COLUMNS}
    mend = "Rename the columns of another version"
    if not table:
        message = f"no column {' or '.join(_COLUMNS)}: {found}; {'; '.join(needs.values())}"
        mend += "; leave this table out if it holds something else"
        raise fault_at(file, 1, f"{message} ({_VERSION}). {mend}")
    missing = [name for name in _COLUMNS.get(table, ()) if name not in header]
    if missing:
        message = f"no column {', '.join(missing)}: {found}; {needs[table]} ({_VERSION})"
        raise fault_at(file, 1, f"{message}. {mend}, or write the table again")
    return table


def _products(rows: Sequence[Row], context: ImportContext) -> Imported:
    check_kind(context.device)
    faults: list[Fault] = []
    skipped: Counter[str] = Counter()
    called, device, tool = told(rows, context)
    peaks = {each.kind: dict(each.peak_flops_per_second) for each in load_catalogue()}
    best: dict[tuple[object, ...], _Ranked] = {}
    for row in rows:
        name = row.cells["gemm_dtype"].lower()
        if name not in _FORMATS:
            skipped[f"gemm_dtype {shown(name)}, of which no plan makes use"] += 1
            continue
        before = len(faults)
        sizes = [size(row, column, context, faults) for column in ("m", "n", "k")]
        seconds = seconds_of(row, context, faults)
        sustained = was_sustained(row, context, faults)
        if len(faults) > before:
            continue
        if sizes[0] < _LEAST_TOKENS:
            skipped[f"of fewer than {_LEAST_TOKENS} tokens, as decoding has"] += 1
            continue
        peak = peaks.get(device, {}).get(_FORMATS[name])
        if peak and (share := 2.0 * sizes[0] * sizes[1] * sizes[2] / seconds / peak) > _OVER_PEAK:
            message = (
                f"gives {share:.3g} times the peak of {device}: remove the table's broken rows, or "
                "say with --device which kind it is"
            )
            faults.append(Fault(file=context.file, line=row.line, field="latency", message=message))
            continue
        sample = _sustained_product(device, _FORMATS[name], sizes, seconds)
        rank = (sustained, sortable(row.cells.get("version", "")))
        held = best.get(sample.shape)
        if held is not None:
            skipped[_OLDER if held[0][0] == sustained else _BESIDE_SUSTAINED] += 1
        if held is None or rank > held[0]:
            best[sample.shape] = rank, sample if sustained else kept_up(sample)
    refuse_all(faults)
    kept = _thinned(list(best.values()), skipped)
    return Imported(
        kind="aiconfigurator",
        tool_version=tool,
        device_name=called,
        operator_samples=tuple(sample for _, sample in kept),
        notes=(*_burst_notes(kept), *other_device(called, context)),
        skipped=counted(skipped),
    )


def _burst_notes(kept: Sequence[_Ranked]) -> Iterator[str]:
    """How much slower the bursts among the samples were made, and how far that may be off."""
    bursts = [sample for (sustained, *_), sample in kept if not sustained]
    if not bursts:
        return
    factors = [
        sustained_factor(each.device, each.precision, 2.0 * each.m * each.n * each.k)
        for each in bursts
    ]
    times = " to ".join(dict.fromkeys(f"{each:g}" for each in (min(factors), max(factors))))
    slowed = f"made {times} times as long, by operations of a launch"
    if bursts[0].device in WITHOUT_LIMIT:
        slowed = f"which {bursts[0].device} keeps up: not slowed"
    low, high = (
        value / bursts[0].median_seconds - 1.0
        for value in (bursts[0].p10_seconds, bursts[0].p90_seconds)
    )
    yield (
        f"{len(bursts)} of {len(kept)} rows are bursts (no power), {slowed}; p10 and p90 "
        f"({low:.0%}, {high:+.0%}) are the error of that, not of the runs"
    )


def _thinned(rows: Sequence[_Ranked], skipped: Counter[str]) -> list[_Ranked]:
    """At most so many of each format, drawn by their sizes' checksums: every tenth row would fall
    in with the grid of sizes.
    """
    taken: Counter[str] = Counter()
    chosen: set[tuple[object, ...]] = set()
    for _, each in sorted(rows, key=lambda row: crc32(repr(row[1].shape).encode())):
        taken[each.precision] += 1
        if taken[each.precision] <= _MOST_ROWS:
            chosen.add(each.shape)
    if len(chosen) < len(rows):
        reason = f"beyond {_MOST_ROWS} of one format, which the fit need not have"
        skipped[reason] += len(rows) - len(chosen)
    return [row for row in rows if row[1].shape in chosen]


def _sustained_product(
    device: str, precision: str, sizes: Sequence[int], seconds: float
) -> OperatorSample:
    wide = precision if precision == Precision.FLOAT16 else Precision.BFLOAT16.value
    return OperatorSample(
        device=device,
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
        repeats=floor(_SUSTAINED_SECONDS / seconds) + 1,
        outliers=0,
    )


def _collectives(rows: Sequence[Row], context: ImportContext) -> Imported:
    faults: list[Fault] = []
    skipped: Counter[str] = Counter()
    called, _, tool = told(rows, context)
    samples: dict[tuple[object, ...], tuple[tuple[object, ...], LinkSample]] = {}
    for row in rows:
        operation = _OPERATIONS.get(row.cells["op_name"].lower())
        each = _ELEMENT_BYTES.get(row.cells["nccl_dtype"].lower())
        if operation is None or each is None:
            name = f"{row.cells['op_name']} of {row.cells['nccl_dtype']}"
            skipped[f"{shown(name)} is no collective of a known format"] += 1
            continue
        if "oneccl" in {row.cells.get(name, "").lower() for name in ("framework", "kernel_source")}:
            skipped["oneCCL counts one rank's part in some collectives; use another benchmark"] += 1
            continue
        before = len(faults)
        ranks = size(row, "num_gpus", context, faults)
        elements = size(row, "message_size", context, faults)
        seconds = seconds_of(row, context, faults)
        if len(faults) > before:
            continue
        if ranks < 2:
            skipped["of one device alone"] += 1
            continue
        sample = LinkSample(
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
        key = (operation, ranks, elements * each)
        # Tables repeat their sizes in 1-byte integers; gradients and activations are wider.
        rank = (each > 1, sortable(row.cells.get("version", "")))
        if key in samples:
            skipped["of an older version, or as many bytes of another format"] += 1
        if key not in samples or rank > samples[key][0]:
            samples[key] = rank, sample
    refuse_all(faults)
    return Imported(
        kind="aiconfigurator",
        tool_version=tool,
        device_name=called,
        links=tuple(sample for _, sample in samples.values()),
        notes=("one time per size, whose spread is not said",) if samples else (),
        skipped=counted(skipped),
    )


# ---- rows: columns by name, what the user asked for, sizes and seconds


_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its line, from 1, and its cells by column."""

    line: int
    cells: Mapping[str, str]


def header_of(text: str, file: str) -> list[str]:
    """The names of the columns; an InputError where two have the same."""
    names = [name.strip() for name in text.split("\n", 1)[0].split(",")]
    faults = [
        Fault(
            file=file,
            line=1,
            field=name,
            message=f"{count} columns have this name: rename or remove all but one",
        )
        for name, count in Counter(names).items()
        if name and count > 1
    ]
    refuse_all(faults)
    return names


def rows_of(text: str, file: str) -> Iterator[Row]:
    """Every row that is not empty; an InputError where one has other columns than the header."""
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
            yield Row(reader.line_num, dict(named))
    except csv.Error as error:
        raise fault_at(file, 1, f"is no CSV: {str(error)[:80]}") from error


def asked(rows: Sequence[Row], context: ImportContext) -> list[Row]:
    """Rows of the framework and the version that the user names."""
    kept = list(rows)
    for column, wanted in (("framework", context.framework), ("version", context.version)):
        if wanted is None:
            continue
        found = sorted({row.cells.get(column, "") for row in kept})
        kept = [row for row in kept if row.cells.get(column, "").lower() == wanted.lower()]
        if not kept:
            names = ", ".join(map(shown, found[:6]))
            message = f"no row is of {shown(wanted)}; there are {names}"
            raise fault_at(context.file, 1, message, column)
    return kept


def only_one(column: str, rows: Sequence[Row], context: ImportContext, mend: str) -> None:
    """Refuse rows of several devices or frameworks, whose times do not mix."""
    found: dict[str, int] = {}
    for row in rows:
        found.setdefault(row.cells.get(column, "").lower(), row.line)
    if len(found) > 1:
        names = ", ".join(map(shown, list(found)[:4]))
        message = f"rows of several {column}s, {names}: {mend}"
        raise fault_at(context.file, list(found.values())[1], message, column)


def told(rows: Sequence[Row], context: ImportContext) -> tuple[str, str, str]:
    """What the rows call the device, its kind (or that name), and what measured."""
    called = "".join(filter(str.isprintable, rows[0].cells.get("device", "")))
    versions = sorted({row.cells.get("version", "") for row in rows}, key=sortable)
    tool = f"{rows[0].cells.get('framework', '')} {versions[-1]}".strip()
    return called, context.device or _kind(called) or called, tool[:60]


def check_kind(device: str | None) -> None:
    """Refuse a kind of the catalogue that is cut short or misspelt: no plan would find its samples.

    Other names are of kinds in cluster files, and the store keeps their samples.
    """
    kinds = [each.kind for each in load_catalogue()]
    meant = meant_kinds(device, kinds) if device and device not in kinds else ()
    if meant:
        message = (
            f"unknown device kind {shown(device or '')}; nearest: {', '.join(meant)}; a kind of "
            "your own goes into a file of ~/.config/hetplan/devices (docs/device-kinds.md)"
        )
        raise InputError(Fault(field="--device", message=message))


def _kind(device: str) -> str:
    return kind_called(device, load_catalogue()) if device else ""


def counted(skipped: Counter[str], most: int = 20) -> tuple[str, ...]:
    """Lines for `Imported.skipped`, the most frequent first."""
    lines = [f"{count} rows: {reason}" for reason, count in skipped.most_common()]
    rest = sum(count for _, count in skipped.most_common()[most:])
    return (*lines[:most], *((f"{rest} rows of other names",) if rest else ()))


def size(row: Row, column: str, context: ImportContext, faults: list[Fault]) -> int:
    """The whole number of a column; a fault and 1 where there is none."""
    number = whole_number(row.cells[column])
    if number is None or not 1 <= number < 2**40:
        message = f"found {shown(row.cells[column])}; write a whole number of at least 1"
        faults.append(Fault(file=context.file, line=row.line, field=column, message=message))
        return 1
    return number


def seconds_of(row: Row, context: ImportContext, faults: list[Fault]) -> float:
    """The latency; a fault and 1 where there is none."""
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


def was_sustained(row: Row, context: ImportContext, faults: list[Fault]) -> bool:
    """Whether power was measured, which the collector does in long runs; a fault for no power."""
    text = row.cells.get("power", "")
    watts = finite_number(text) if text else 0.0
    if watts is None or watts < 0:
        message = f"found {shown(text)}; write watts, or nothing or 0 where none were measured"
        faults.append(Fault(file=context.file, line=row.line, field="power", message=message))
    return bool(watts)


def sortable(text: str) -> tuple[object, ...]:
    """Sorts 1.10 after 1.9, and a candidate (1.3.0rc4) before its release."""
    rest = text.lstrip("v.0123456789")
    early = re.match(r"[._-]?(?:rc|a|b|dev)", rest) is not None
    return _numbers(text.removesuffix(rest)), not early, _numbers(rest)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in re.findall(r"[0-9]+", text)[:6])


def other_device(called: str, context: ImportContext) -> tuple[str, ...]:
    """A note where the user's kind is not the one that the rows name."""
    if not context.device or not called or _kind(called) == context.device:
        return ()
    return (f"the table says {shown(called)}; it is taken for {context.device}",)
