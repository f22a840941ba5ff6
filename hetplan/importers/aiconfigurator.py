"""AIConfigurator's tables of products and collectives (gemm_perf.txt, nccl_perf.txt) to samples.

CSV with a header, one row per shape; latencies are milliseconds. Rows of products with a `power`
ran for 0.3 to 1 s and are kept as they are. The others are bursts of 6 runs: they are slowed to
what a device at its power limit keeps up (`hetplan.profiling.bursts`). Times of narrow formats hold
the quantising of the activations. `message_size` of collectives counts elements
(collector/collect_nccl.py). Of rows of one shape those that ran long come first, then those of the
newest version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import floor
from typing import TypeAlias
from zlib import crc32

from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import Fault
from hetplan.importers.aiconfigurator_rows import (
    Row,
    asked,
    check_kind,
    counted,
    header_of,
    only_one,
    other_device,
    rows_of,
    seconds_of,
    size,
    sortable,
    told,
    was_sustained,
)
from hetplan.importers.lines import fault_at, refuse_all, shown
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
