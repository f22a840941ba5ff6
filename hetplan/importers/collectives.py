"""What nccl-tests and rccl-tests measure: rows of one run to link samples, checked against itself.

A row gives bytes, time, algbw and busbw, and two of the four follow from the others:

    algbw = bytes / time            busbw = algbw * factor(operation, ranks)

so a lost digit, a wrong number of ranks and a wrong name of the operation are noticed.
(doc/PERFORMANCE.md of nccl-tests derives the factors.) `bytes` is what LinkSample means by it: the
program prints the larger of what a rank sends and receives, the full tensor.

The JSON of both is read here, the printed form in `nccl_tests`. `-J` writes an object: `args`,
`nccl_version`, `config` (with `devices`) and `results`, each with `out_of_place` and `in_place`
(`src/util.cu`). `devices` holds the first device of each process, so ranks are processes * threads
* devices. `-Z json` of rccl-tests writes a list with one object per row and half (`Reporter` in
`src/common.cu`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetplan.errors import InputError
from hetplan.files.reading import Document
from hetplan.importers import json_text
from hetplan.importers.lines import fault_at, finite_number, shown
from hetplan.importers.records import ImportContext, Imported
from hetplan.profiling.samples import LinkOperation, LinkSample
from hetplan.profiling.timing import summarise

OPERATIONS: dict[str, LinkOperation | None] = {
    "allreduce": LinkOperation.ALL_REDUCE,
    "allgather": LinkOperation.ALL_GATHER,
    "reducescatter": LinkOperation.REDUCE_SCATTER,
    "alltoall": LinkOperation.ALL_TO_ALL,
    "broadcast": LinkOperation.BROADCAST,
    "sendrecv": LinkOperation.SEND_RECV,
    "reduce": None,
    "gather": None,
    "scatter": None,
    "hypercube": None,
    "alltoallv": None,
    "allreducebias": None,
    "allreducewithbias": None,
}
"""Programs of the tests by name without `_` and `_perf`; None: hetplan has no such operation."""

_PROGRAM = re.compile(r"\b([a-z_]{3,30})_perf(?![a-z0-9])")
_BEFORE_NAME = re.compile(r"_{0,2}(?:[nr]ccl_)?")  # files and links are named nccl_all_reduce, too
# Bytes, seconds and bandwidths are rounded when they are printed, so their quotients differ a
# little more than the rounding of one says.
_SLACK = 2e-3

MEAN_NOTE = (
    "seconds are means over a run's iterations (and over its ranks, unless -a says otherwise), "
    "not medians of the slowest rank; p10 and p90 repeat them"
)


CPU_TIME = "the time is the processor's own (-C), not the operation's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """One printed number in base units, and half the step it was rounded to."""

    value: float
    half_step: float = 0.0

    def around(self) -> tuple[float, float]:
        """Least and greatest number that may have been rounded to it."""
        least, most = max(0.0, self.value - self.half_step), self.value + self.half_step
        return least * (1 - _SLACK), most * (1 + _SLACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The three numbers of a row, of which one follows from the two others and the bytes."""

    seconds: Rounded
    algorithm_rate: Rounded
    bus_rate: Rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One out-of-place measurement."""

    line: int
    message_bytes: int
    dtype: str
    reduces: bool
    rooted: bool
    """Whether a rank is the root."""
    figures: Figures
    wrong: str
    """Why it must not be used; empty: it may be."""
    in_place_unchecked: bool | None = None
    """Whether only the in-place half went unchecked, as alltoall_perf and sendrecv_perf do; None:
    cannot tell."""
    iteration_seconds: tuple[float, ...] = ()
    """Time of every iteration, where the output has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One table of one program."""

    line: int
    program: str
    """As the output or its command line says it, as in `all_reduce`; empty: it does not."""
    group_size: int
    iterations: int
    """0: the output does not say."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything that one file says."""

    runs: tuple[Run, ...]
    version: str
    device: str


def without_lone_ranks(run: Run) -> Run:
    """The run; without its rows where it has one rank, which uses no link."""
    if run.group_size > 1 or not run.rows:
        return run
    message = (
        f"line {run.rows[0].line}: {count_of(len(run.rows))} of one rank, which uses no link; "
        "nccl-tests needs `make MPI=1` to join processes"
    )
    return replace(run, rows=(), skipped=(*run.skipped, message))


def figures(texts: Mapping[str, str], step: Callable[[str], float]) -> Figures:
    """What a row prints, in this order: its time in microseconds, its two rates in GB/s.

    `step` is what a text was rounded to.
    """
    units = (1e6, 1e-9, 1e-9)  # divided by: 91.13 us becomes the nearest float
    seconds, algorithm_rate, bus_rate = (
        Rounded(value=(finite_number(text) or 0.0) / unit, half_step=step(text) / unit / 2)
        for text, unit in zip(texts.values(), units, strict=True)
    )
    return Figures(seconds=seconds, algorithm_rate=algorithm_rate, bus_rate=bus_rate)


def run_notes(groups: int, together: int, graph: int) -> Iterator[str]:
    """How the operations of a run were started."""
    if groups > 1:
        yield f"{groups} groups worked at the same time"
    if together > 1:
        yield f"{together} operations were started together (-m); time is of one"
    if graph > 0:
        yield "operations were replayed from a graph (-G), without launches"


def why_unusable(size: int, texts: Mapping[str, str], wrong: str, file: str, line: int) -> str:
    """Why a row must not be used; an InputError where it is not as the programs print it."""
    for name, text in texts.items():
        value = finite_number(text)
        if value is None and text.lstrip("-+").lower() not in ("nan", "inf"):
            raise fault_at(file, line, f"found {shown(text)}; a number is expected here", name)
        if value is None or value < 0:
            return f"{name} is {text}"
    if not size:
        return "a message of no bytes"
    microseconds = finite_number(next(iter(texts.values())))
    if not microseconds or not microseconds / 1e6:  # too small for a float of seconds
        return "the time is 0"
    if wrong.upper() == "N/A":
        return ""
    count = finite_number(wrong)
    if count is None and wrong.lower().lstrip("-") not in ("nan", "inf"):
        raise fault_at(
            file, line, f"found {shown(wrong)}; a number or N/A is expected here", "#wrong"
        )
    if count is None:
        return f"{wrong} wrong elements"
    # Before 2022 the column held the largest relative error, which rounding makes small.
    return f"{count:g} wrong elements" if count >= 1 else ""


def program_names(text: str) -> list[str]:
    """Programs of the tests that a text mentions, in its order."""
    found = (_BEFORE_NAME.sub("", each.group(1)) for each in _PROGRAM.finditer(text))
    return [name for name in found if plain_name(name) in OPERATIONS]


def count_of(rows: int) -> str:
    """`1 row`, `2 rows`."""
    return "1 row" if rows == 1 else f"{rows} rows"


def plain_name(program: str) -> str:
    """`all_reduce`, `AllReduce` and `all_reduce_perf` are the same."""
    return program.replace("_", "").lower().removesuffix("mpi").removesuffix("perf")


def imported_of(kind: str, output: Output, context: ImportContext) -> Imported:
    """The samples of all runs; an InputError where there is no row at all."""
    if context.link is None:
        raise InputError(
            f"{context.file}: the output does not say which link it measured; give the name that "
            "the cluster file uses for it"
        )
    if not any(run.rows or run.skipped for run in output.runs):
        raise fault_at(context.file, 0, "no row of results found; give the whole output of a run")
    links: list[LinkSample] = []
    notes: list[str] = []
    skipped: list[str] = []
    for run in output.runs:
        operation = _operation(run, context.file)
        notes += run.notes
        skipped += run.skipped
        usable = [row for row in run.rows if not row.wrong]
        skipped += [f"line {row.line}: {row.wrong}" for row in run.rows if row.wrong]
        if operation is None:
            if usable:
                name = run.program or "reduce, gather or scatter"
                skipped.append(f"line {usable[0].line}: {count_of(len(usable))} of {name}")
                notes.append(f"hetplan has no operation for {name}")
            continue
        _check_rates(usable, run, operation, context.file)
        notes += _row_notes(usable, run, operation)
        links += [_sample(row, run, operation, context.link) for row in usable]
    return Imported(
        kind=kind,
        tool_version=output.version,
        device_name=output.device,
        links=tuple(links),
        notes=tuple(dict.fromkeys(notes)),
        skipped=tuple(skipped),
    )


def _sample(row: Row, run: Run, operation: LinkOperation, link: str) -> LinkSample:
    several = len(row.iteration_seconds) > 1
    timing = summarise(
        row.iteration_seconds if several else (row.figures.seconds.value,), steady=True
    )
    return LinkSample(
        link=link,
        operation=operation.value,
        backend="nccl",
        group_size=run.group_size,
        message_bytes=row.message_bytes,
        median_seconds=timing.median_seconds,
        p10_seconds=timing.p10_seconds,
        p90_seconds=timing.p90_seconds,
        repeats=timing.repeats if several else max(1, run.iterations),
        outliers=timing.outliers,
    )


def _row_notes(rows: Sequence[Row], run: Run, operation: LinkOperation) -> Iterable[str]:
    if any(row.iteration_seconds for row in rows):
        yield "median, p10 and p90 are of the slowest device's times per iteration (-I)"
    if any(not row.iteration_seconds for row in rows):
        yield MEAN_NOTE
        if not run.iterations:
            yield "the output does not say how many iterations a time is the mean of; repeats is 1"
    types = sorted({row.dtype for row in rows})
    if len(types) > 1:
        yield f"rows of the types {', '.join(types)} stand together; samples have no type"
    if rows and operation is LinkOperation.SEND_RECV:
        yield "sendrecv_perf: every rank sends and receives at the same time, so both directions"


def _operation(run: Run, file: str) -> LinkOperation | None:
    """The operation that the run says, or the only one that its numbers agree with."""
    if run.program:
        return OPERATIONS[plain_name(run.program)]
    usable = [row for row in run.rows if not row.wrong]
    if not usable:
        return None
    fitting = [each for each in _CANDIDATES if _fits(each, usable, run)]
    if len(fitting) == 1:
        return fitting[0].operation
    if fitting and all(each.operation is None for each in fitting):
        return None
    named = dict.fromkeys(program_names(file) + program_names(f"{file.rpartition('.')[0]}_perf"))
    told = {OPERATIONS[plain_name(name)] for name in named}
    if len(told) == 1 and (only := told.pop()) in {each.operation for each in fitting}:
        return only
    could = (
        ", ".join(each.name for each in fitting)
        or f"none that is known, among {run.group_size} ranks"
    )
    raise fault_at(
        file,
        run.line,
        f"the output does not say which program printed this table (it could be {could}); add a "
        "line such as `# Collective test starting: all_gather_perf` before it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    name: str
    operation: LinkOperation | None
    reduces: bool | None
    """None: sendrecv_perf prints an operator, and does not use it."""
    rooted: bool


_CANDIDATES = (
    _Candidate(name="all_reduce", operation=LinkOperation.ALL_REDUCE, reduces=True, rooted=False),
    _Candidate(
        name="reduce_scatter", operation=LinkOperation.REDUCE_SCATTER, reduces=True, rooted=False
    ),
    _Candidate(name="reduce", operation=None, reduces=True, rooted=True),
    _Candidate(name="broadcast", operation=LinkOperation.BROADCAST, reduces=False, rooted=True),
    _Candidate(name="gather", operation=None, reduces=False, rooted=True),
    _Candidate(name="all_gather", operation=LinkOperation.ALL_GATHER, reduces=False, rooted=False),
    _Candidate(name="alltoall", operation=LinkOperation.ALL_TO_ALL, reduces=False, rooted=False),
    _Candidate(name="sendrecv", operation=LinkOperation.SEND_RECV, reduces=None, rooted=False),
)


def _fits(candidate: _Candidate, rows: Sequence[Row], run: Run) -> bool:
    if any(row.rooted != candidate.rooted for row in rows):
        return False
    if candidate.reduces is not None and any(row.reduces != candidate.reduces for row in rows):
        return False
    checked = {row.in_place_unchecked for row in rows}
    exempt = candidate.operation in (LinkOperation.ALL_TO_ALL, LinkOperation.SEND_RECV)
    if (not exempt) in checked:
        return False
    bus = _bus_factor(candidate.operation, candidate.name, run.group_size)
    return not any(_disagreement(row, bus) for row in rows)


def _bus_factor(operation: LinkOperation | None, name: str, ranks: int) -> float:
    """Busbw / algbw of an operation."""
    part = (ranks - 1) / ranks
    if operation is LinkOperation.ALL_REDUCE:
        return 2 * part
    partial = (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_TO_ALL)
    return part if operation in partial or name in ("gather", "scatter") else 1.0


def _check_rates(rows: Sequence[Row], run: Run, operation: LinkOperation, file: str) -> None:
    bus = _bus_factor(operation, operation.value, run.group_size)
    reduces = operation in (LinkOperation.ALL_REDUCE, LinkOperation.REDUCE_SCATTER)
    for row in rows:
        if row.reduces != reduces and operation is not LinkOperation.SEND_RECV:
            has = "has an" if row.reduces else "has no"
            message = f"the row {has} operator (redop), so it is not of {operation.value}"
            raise fault_at(file, row.line, message)
        problem = _disagreement(row, bus)
        if problem:
            what = f"{operation.value} among {run.group_size} ranks"
            raise fault_at(file, row.line, f"{problem}, as in {what}; a number was changed or lost")


def _disagreement(row: Row, bus: float) -> str:
    """What does not fit together in a row; empty: all does."""
    figures = row.figures
    low, high = figures.seconds.around()
    rate = (row.message_bytes / high, row.message_bytes / max(low, 1e-300))
    if not _overlap(rate, figures.algorithm_rate.around()):
        printed = figures.algorithm_rate.value / 1e9
        computed = row.message_bytes / figures.seconds.value / 1e9
        return f"algbw is {printed:.6g} GB/s and bytes / time is {computed:.6g}"
    if not _overlap((rate[0] * bus, rate[1] * bus), figures.bus_rate.around()):
        printed, computed = (
            figures.bus_rate.value / 1e9,
            figures.algorithm_rate.value / 1e9 * bus,
        )
        return f"busbw is {printed:.6g} GB/s and not {bus:.6g} times algbw, {computed:.6g}"
    return ""


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


# ---- JSON


def version_words(code: int) -> str:
    """NCCL_VERSION_CODE as words: 22703 is 2.27.3, 2708 is 2.7.8 (nccl.h changed it at 2.9)."""
    big = 10000 if code >= 10000 else 1000
    return f"{code // big}.{code % big // 100}.{code % 100}"


def read_json_output(text: str, file: str) -> Output:
    """The run, or runs, of a JSON file."""
    document = json_text.json_document(file, text)
    if isinstance(document.root, list):
        return Output(runs=tuple(_listed_runs(document)), version="", device="")
    if not isinstance(document.root, dict) or not isinstance(document.at("results"), list):
        raise fault_at(file, 1, "found no list `results`; is this the file of -J?")
    version = json_text.optional_whole(document, "nccl_version")
    name = ""
    if json_text.has(document, "config", "devices", 0):
        name = json_text.optional_word(document, "config", "devices", 0, "device_info")
    return Output(
        runs=(_run(document),),
        version="" if version is None else f"NCCL {version_words(version)}",
        device=name.strip(),
    )


def _run(document: Document) -> Run:
    programs: list[str] = []
    if json_text.has(document, "args", 0):
        programs = program_names(json_text.word(document, "args", 0))
    size, groups = _group_size(document)
    notes = list(
        run_notes(
            groups,
            json_text.optional_whole(document, "config", "aggregated_iterations") or 1,
            json_text.optional_whole(document, "config", "graph") or 0,
        )
    )
    if document.at("config", "blocking_collectives") == "true":
        notes.append("the processor waited after each operation (-z)")
    if document.at("out_of_bounds", "okay") == "false":
        notes.append("the program says that values were out of bounds")
    if not json_text.has(document, "end_time"):
        notes.append("the file says no end_time; the run may have failed")
    return without_lone_ranks(
        Run(
            line=document.line(("results",)),
            program=programs[-1] if programs else "",
            group_size=size,
            iterations=json_text.optional_whole(document, "config", "iterations") or 0,
            rows=tuple(_row(document, at) for at in document.entries(("results",))),
            notes=tuple(notes),
        )
    )


def _group_size(document: Document) -> tuple[int, int]:
    """(ranks of rank 0's group, number of groups)."""
    processes = document.entries(("config", "devices"))
    if not processes:
        raise json_text.wrong(document, ("config", "devices"), "a list of devices")
    per_process = 1
    for name in ("nthreads", "ngpus"):
        per_process *= json_text.optional_whole(document, "config", name) or 1
    groups = [
        json_text.optional_whole(document, "config", "devices", at, "group") or 0
        for at in processes
    ]
    return groups.count(groups[0]) * per_process, len(set(groups))


def _row(document: Document, at: int) -> Row:
    path = ("results", at)
    half = (*path, "out_of_place")
    size = json_text.whole(document, *path, "size")
    texts = {"time": "0", "alg_bw": "0", "bus_bw": "0"}
    if not isinstance(document.at(*half), dict):
        reason = "in-place only"
    elif json_text.has(document, *half, "cpu_time"):
        reason = CPU_TIME
    else:
        texts = {name: _number_text(document, (*half, name)) for name in texts}
        wrong = _number_text(document, (*half, "nwrong"), "N/A")
        reason = why_unusable(size, texts, wrong, document.file, document.line(path))
    root = json_text.optional_word(document, *path, "root").strip()
    checked = json_text.has(document, *half, "nwrong") and json_text.has(
        document, *path, "in_place"
    )
    unchecked = not json_text.has(document, *path, "in_place", "nwrong")
    return Row(
        line=document.line(path),
        message_bytes=size,
        dtype=json_text.word(document, *path, "type"),
        reduces=json_text.optional_word(document, *path, "redop") not in ("", "none"),
        rooted=bool(root) and not root.startswith("-"),
        wrong=reason,
        in_place_unchecked=unchecked if checked else None,
        iteration_seconds=() if reason else tuple(_iteration_seconds(document, at)),
        figures=figures(texts, _step),
    )


def _iteration_seconds(document: Document, at: int) -> Iterator[float]:
    """Times of the iterations that the program itself counts; it may leave out the first."""
    path = ("results", at, "out_of_place_per_iter")
    if not json_text.has(document, *path):
        return
    skipped = json_text.optional_whole(document, *path, "skipped_iterations") or 0
    for entry in document.entries((*path, "times_us"))[skipped:]:
        seconds = json_text.number(document, *path, "times_us", entry) / 1e6
        if seconds <= 0:
            raise json_text.wrong(document, (*path, "times_us", entry), "a time above 0")
        yield seconds


def _number_text(document: Document, path: tuple[str | int, ...], missing: str = "") -> str:
    """The number at this path as text; also `nan` and `inf`, which the programs write as words."""
    value = document.at(*path)
    if value is None and missing:
        return missing
    if isinstance(value, str) and value.lstrip("-").lower() in ("nan", "inf", "n/a"):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return value.strip()[:18]
    return repr(json_text.number(document, *path))


def _listed_runs(document: Document) -> Iterator[Run]:
    """Rows of `-Z json`: one run per program and number of ranks, in the order of the file."""
    if not document.entries(()):
        raise fault_at(document.file, 1, "the list of results is empty")
    places: dict[tuple[str, int], list[int]] = {}
    for at in document.entries(()):
        name = json_text.word(document, at, "name")
        if plain_name(name) not in OPERATIONS:
            raise json_text.wrong(document, (at, "name"), "the name of a collective")
        ranks = json_text.optional_whole(document, at, "ranks") or 1
        devices = "gpusPerRank" if json_text.has(document, at, "gpusPerRank") else "gpus"
        ranks *= json_text.whole(document, at, devices)
        places.setdefault((name, ranks), []).append(at)
    for (name, ranks), entries in places.items():
        rows = [at for at in entries if not json_text.whole(document, at, "inPlace")]
        line = document.line((entries[0],))
        yield without_lone_ranks(
            Run(
                line=line,
                program=name,
                group_size=max(ranks, 1),
                iterations=0,
                rows=tuple(_listed_row(document, at) for at in rows),
                skipped=() if rows else (f"line {line}: {len(entries)} rows, in-place only",),
            )
        )


def _listed_row(document: Document, at: int) -> Row:
    size = json_text.whole(document, at, "size")
    texts = {key: _number_text(document, (at, key)) for key in ("time", "algBw", "busBw")}
    key = "#wrong" if json_text.has(document, at, "#wrong") else "wrong"
    wrong = _number_text(document, (at, key), "N/A")
    line = document.line((at,))
    return Row(
        line=line,
        message_bytes=size,
        dtype=json_text.word(document, at, "type"),
        reduces=json_text.optional_word(document, at, "redop") not in ("", "none"),
        rooted=False,
        wrong=why_unusable(size, texts, wrong, document.file, line),
        figures=figures(texts, _step),
    )


def _step(_: str) -> float:
    """Both programs print numbers with six decimals (%lf, std::to_string)."""
    return 1e-6
