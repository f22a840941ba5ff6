"""JSON of nccl-tests (`-J`) and rccl-tests (`-J`, `-Z json`) to runs.

`-J` writes an object: `args`, `nccl_version`, `config` (with `devices`) and `results`, each with
`out_of_place` and `in_place` (`src/util.cu`; version 2 adds the times of every iteration).
`devices` holds the first device of each process only, so ranks are processes * threads * devices.
`-Z json` of rccl-tests writes a list with one object per row and half (`Reporter` in
`src/common.cu`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.files.reading import Document
from hetplan.importers import json_text
from hetplan.importers.collectives import (
    OPERATIONS,
    Figure,
    Row,
    Run,
    count_of,
    plain_name,
    program_names,
)
from hetplan.importers.collectives_section import library_version
from hetplan.importers.collectives_text import Output
from hetplan.importers.lines import fault_at, whole_number

_HALF_STEP = 0.5e-6  # both print numbers with six decimals (%lf, std::to_string)


def read_json_output(text: str, file: str) -> Output:
    """The run, or runs, of a JSON file."""
    document = json_text.json_document(file, text)
    if isinstance(document.root, list):
        return Output(runs=tuple(_listed_runs(document)), version="", device="")
    if not isinstance(document.root, dict) or not isinstance(document.at("results"), list):
        raise fault_at(file, 1, "found no list `results`; is this the file of -J?")
    version = json_text.optional_whole(document, "nccl_version")
    name = ""
    if document.at("config", "devices", 0) is not None:
        name = json_text.optional_word(document, "config", "devices", 0, "device_info")
    return Output(
        runs=(_run(document),),
        version="" if version is None else f"NCCL {library_version(version)}",
        device=name.strip(),
    )


def _run(document: Document) -> Run:
    program = ""
    if json_text.has(document, "args", 0):
        found = program_names(json_text.word(document, "args", 0))
        program = found[-1] if found else ""
    size, groups = _group_size(document)
    notes = [f"{groups} groups worked at the same time"] if groups > 1 else []
    together = json_text.optional_whole(document, "config", "aggregated_iterations")
    if together is not None and together > 1:
        notes.append(f"{together} operations were started together (-m); time is of one")
    if json_text.optional_whole(document, "config", "graph"):
        notes.append("operations were replayed from a graph (-G), without launches")
    if document.at("config", "blocking_collectives") == "true":
        notes.append("the processor waited after each operation (-z)")
    if document.at("out_of_bounds", "okay") == "false":
        notes.append("the program says that values were out of bounds")
    if not json_text.has(document, "end_time"):
        notes.append("the file says no end_time; the run may have failed")
    rows = [_row(document, at) for at in document.entries(("results",))]
    skipped = []
    if size == 1 and rows:
        skipped.append(
            f"line {rows[0].line}: {count_of(len(rows))} of one rank, which uses no link"
        )
        rows = []
    return Run(
        line=document.line(("results",)),
        program=program,
        group_size=size,
        iterations=json_text.optional_whole(document, "config", "iterations") or 0,
        rows=tuple(rows),
        notes=tuple(notes),
        skipped=tuple(skipped),
    )


def _group_size(document: Document) -> tuple[int, int]:
    """(ranks of rank 0's group, number of groups)."""
    processes = document.entries(("config", "devices"))
    if not processes:
        raise json_text.wrong(document, ("config", "devices"), "a list of devices")
    each = 1
    for name in ("nthreads", "ngpus"):
        each *= json_text.optional_whole(document, "config", name) or 1
    groups = [
        json_text.optional_whole(document, "config", "devices", at, "group") or 0
        for at in processes
    ]
    return groups.count(groups[0]) * each, len(set(groups))


def _row(document: Document, at: int) -> Row:
    path = ("results", at)
    line = document.line(path)
    half = "out_of_place"
    reason = ""
    size = json_text.whole(document, *path, "size")
    if not isinstance(document.at(*path, half), dict):
        reason = "in-place only"
    elif json_text.has(document, *path, half, "cpu_time"):
        reason = "the time is the processor's own (-C), not the operation's"
    values = {}
    for name in ("time", "alg_bw", "bus_bw"):
        if reason:
            break
        value = document.at(*path, half, name)
        if isinstance(value, str) and value.lstrip("-").lower() in ("nan", "inf"):
            reason = f"{name} is {value}"
        else:
            values[name] = json_text.number(document, *path, half, name)
    reason = reason or _why_unusable(document, path, half, size, values)
    return Row(
        line=line,
        message_bytes=size,
        dtype=json_text.word(document, *path, "type"),
        reduces=json_text.optional_word(document, *path, "redop") not in ("", "none"),
        rooted=_rooted(document, at),
        seconds=_time(values),
        algorithm_rate=_rate(values, "alg_bw"),
        bus_rate=_rate(values, "bus_bw"),
        wrong=reason,
        all_to_all=_only_in_place_unchecked(document, at),
        each_seconds=() if reason else tuple(_each_seconds(document, at)),
    )


def _rate(values: dict[str, float], name: str) -> Figure:
    return Figure(value=values.get(name, 0.0) * 1e9, half_step=_HALF_STEP * 1e9)


def _time(values: dict[str, float]) -> Figure:
    return Figure(value=values.get("time", 0.0) / 1e6, half_step=_HALF_STEP / 1e6)


def _why_unusable(
    document: Document, path: tuple[str | int, ...], half: str, size: int, values: dict[str, float]
) -> str:
    negative = next((name for name, value in values.items() if value < 0), None)
    if negative:
        return f"{negative} is {values[negative]:g}"
    if size == 0:
        return "a message of no bytes"
    if values["time"] / 1e6 == 0:
        return "the time is 0"
    count = document.at(*path, half, "nwrong")
    if count is None:
        return ""
    if isinstance(count, str) and count.lower() == "nan":
        return "nan wrong elements"
    number = json_text.number(document, *path, half, "nwrong")
    return f"{number:g} wrong elements" if number else ""


def _rooted(document: Document, at: int) -> bool:
    # The number is padded with spaces, as it is printed.
    text = json_text.optional_word(document, "results", at, "root").strip()
    return bool(text) and not text.startswith("-")


def _only_in_place_unchecked(document: Document, at: int) -> bool | None:
    out = document.at("results", at, "out_of_place", "nwrong")
    if out is None or not json_text.has(document, "results", at, "in_place"):
        return None
    return document.at("results", at, "in_place", "nwrong") is None


def _each_seconds(document: Document, at: int) -> Iterator[float]:
    """Times of the iterations that the program itself counts; it may leave out the first."""
    path = ("results", at, "out_of_place_per_iter")
    if not json_text.has(document, *path):
        return
    leave_out = json_text.optional_whole(document, *path, "skipped_iterations") or 0
    for entry in document.entries((*path, "times_us")):
        if entry >= leave_out:
            value = json_text.number(document, *path, "times_us", entry)
            if value / 1e6 <= 0:
                raise json_text.wrong(document, (*path, "times_us", entry), "a time above 0")
            yield value / 1e6


def _listed_runs(document: Document) -> Iterator[Run]:
    """Rows of `-Z json`: one run per name and cycle, in the order of the file."""
    if not document.entries(()):
        raise fault_at(document.file, 1, "the list of results is empty")
    order: dict[tuple[str, int], list[int]] = {}
    for at in document.entries(()):
        name = json_text.word(document, at, "name")
        if plain_name(name) not in OPERATIONS:
            raise json_text.wrong(document, (at, "name"), "the name of a collective")
        ranks = json_text.optional_whole(document, at, "ranks") or 1
        each = "gpusPerRank" if json_text.has(document, at, "gpusPerRank") else "gpus"
        ranks *= json_text.whole(document, at, each)
        order.setdefault((name, ranks), []).append(at)
    for (name, ranks), places in order.items():
        yield _listed_run(document, name, ranks, places)


def _listed_run(document: Document, name: str, ranks: int, places: list[int]) -> Run:
    rows, skipped, in_place = [], [], 0
    for at in places:
        if json_text.whole(document, at, "inPlace"):
            in_place += 1
            continue
        rows.append(_listed_row(document, at))
    if ranks < 2 and rows:
        skipped.append(
            f"line {rows[0].line}: {count_of(len(rows))} of one rank, which uses no link"
        )
        rows = []
    if in_place and not rows and not skipped:
        skipped.append(f"line {document.line((places[0],))}: {count_of(in_place)}, in-place only")
    return Run(
        line=document.line((places[0],)),
        program=name,
        group_size=max(ranks, 1),
        iterations=0,
        rows=tuple(rows),
        skipped=tuple(skipped),
    )


def _listed_row(document: Document, at: int) -> Row:
    size = json_text.whole(document, at, "size")
    values = {key: json_text.number(document, at, key) for key in ("time", "algBw", "busBw")}
    wrong = document.at(at, "#wrong" if json_text.has(document, at, "#wrong") else "wrong")
    reason = ""
    negative = next((name for name, value in values.items() if value < 0), None)
    if negative:
        reason = f"{negative} is {values[negative]:g}"
    elif size == 0:
        reason = "a message of no bytes"
    elif values["time"] / 1e6 == 0:
        reason = "the time is 0"
    elif wrong not in ("N/A", "0", 0, None):
        if not isinstance(wrong, int | str) or (
            isinstance(wrong, str) and whole_number(wrong) is None
        ):
            raise json_text.wrong(document, (at, "wrong"), "a number of elements or N/A")
        reason = f"{str(wrong)[:20]} wrong elements"
    return Row(
        line=document.line((at,)),
        message_bytes=size,
        dtype=json_text.word(document, at, "type"),
        reduces=json_text.optional_word(document, at, "redop") not in ("", "none"),
        rooted=False,
        seconds=_time(values),
        algorithm_rate=_rate(values, "algBw"),
        bus_rate=_rate(values, "busBw"),
        wrong=reason,
    )
