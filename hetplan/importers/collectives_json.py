"""JSON of nccl-tests (`-J`) and rccl-tests (`-J`, `-Z json`) to runs.

`-J` writes an object: `args`, `nccl_version`, `config` (with `devices`) and `results`, each with
`out_of_place` and `in_place` (`src/util.cu`). `devices` holds the first device of each process, so
ranks are processes * threads * devices. `-Z json` of rccl-tests writes a list with one object per
row and half (`Reporter` in `src/common.cu`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.files.reading import Document
from hetplan.importers import json_text
from hetplan.importers.collectives import (
    OPERATIONS,
    Output,
    Rounded,
    Row,
    Run,
    plain_name,
    program_names,
    why_unusable,
    without_lone_ranks,
)
from hetplan.importers.lines import fault_at

_HALF_STEP = 0.5e-6  # both print numbers with six decimals (%lf, std::to_string)


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
        reason = "the time is the processor's own (-C), not the operation's"
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
        seconds=_rounded(texts["time"], 1e6),
        algorithm_rate=_rounded(texts["alg_bw"], 1e-9),
        bus_rate=_rounded(texts["bus_bw"], 1e-9),
        wrong=reason,
        in_place_unchecked=unchecked if checked else None,
        iteration_seconds=() if reason else tuple(_iteration_seconds(document, at)),
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


def _rounded(text: str, per_base_unit: float) -> Rounded:
    value = float(text) if text.lstrip("-").lower() not in ("nan", "inf") else 0.0
    return Rounded(value=value / per_base_unit, half_step=_HALF_STEP / per_base_unit)


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
    return Row(
        line=document.line((at,)),
        message_bytes=size,
        dtype=json_text.word(document, at, "type"),
        reduces=json_text.optional_word(document, at, "redop") not in ("", "none"),
        rooted=False,
        seconds=_rounded(texts["time"], 1e6),
        algorithm_rate=_rounded(texts["algBw"], 1e-9),
        bus_rate=_rounded(texts["busBw"], 1e-9),
        wrong=why_unusable(size, texts, wrong, document.file, document.line((at,))),
    )
