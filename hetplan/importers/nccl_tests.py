"""Output of nccl-tests, printed or JSON (`-J FILE`), to link samples.

What is read of the printed form (`src/common.cu` and `src/util.cu`, 2019 to 2026):

    # Collective test starting: all_reduce_perf           since 2025
    # nThread 1 nGpus 8 ... iters: 20 agg iters: 1 ...
    #  Rank  0 Group  0 Pid 41 on node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
    #       size         count      type   redop    root     time   algbw   busbw #wrong ...
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)        ...
         1048576        262144     float     sum      -1    61.52   17.05   29.83      0 ...

Columns are located by their names, so optional ones (hipevt, i_min, algo) do not matter. A file may
hold several tables, and every line may carry a launcher's rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hetplan.importers.collectives import (
    CPU_TIME,
    Output,
    Row,
    Run,
    figures,
    imported_of,
    plain_name,
    program_names,
    read_json_output,
    run_notes,
    version_words,
    why_unusable,
    without_lone_ranks,
)
from hetplan.importers.json_text import looks_like_json
from hetplan.importers.lines import (
    Line,
    fault_at,
    finite_number,
    rounding_of,
    shown,
    text_lines,
    whole_number,
    without_rank_label,
)
from hetplan.importers.records import ImportContext, Imported

_SIGN = re.compile(r"nccl-tests|nThread \d+ nGpus|nccl_version|algbw +busbw")
_RANK = re.compile(
    r"#\s{0,20}Rank\s{1,20}(\d{1,9}) (?:Group\s{1,20}(-?\d{1,12}) )?(?:Pid\s{1,20}\d{1,12} )?"
    r"on\s{1,30}(\S{1,1024}) device\s{1,20}\d{1,9} \[[^\]]{0,60}\] ?(.{0,200})",
    re.ASCII,
)
_COUNTS = re.compile(r"\b(warmup iters|iters|agg iters|graph):\s{0,4}(\d{1,9})", re.ASCII)
_VERSION = re.compile(r"(?:#\s?)?[nr]ccl-tests(?:: Version| version) (\S{1,60})", re.ASCII)
_LIBRARY = re.compile(r"[nr]ccl-library=(\d{4,6})", re.ASCII)
_LIBRARY_LINE = re.compile(r"\b([NR]CCL) version ?:? ?(\d\S{0,40})")
_ROW = re.compile(r"\s{0,40}\d{1,18}\s{1,40}\d{1,18}\s{1,40}[A-Za-z]\w{0,20}(?:\s|$)", re.ASCII)
_FAILURE = re.compile(r"Test (?:NCCL|RCCL|CUDA|HIP|failure|timeout)[ -~]{0,120}")
_BLANK_HALF = re.compile(r"\S\s{24,60}")  # an omitted half of a row; the widest other gap is 9
_NRANKS = re.compile(r"\bnranks (\d{1,7})\b", re.ASCII)
_TAIL = ("timestamp", "algo", "proto", "nchannels")


def detect(text: str) -> bool:
    """Whether the text names the program or has its columns."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """One sample per row; `context.link` names the link.

    Raises InputError for what is no output of nccl-tests, for a row that was cut off or
    contradicts itself, and where the program or the number of ranks cannot be known.
    """
    return parse_as("nccl-tests", text, context)


def parse_as(kind: str, text: str, context: ImportContext) -> Imported:
    """The same for a program of the family; torch calls the backend of all of them `nccl`."""
    if looks_like_json(text):
        output = read_json_output(text, context.file)
    else:
        output = _Reader(context.file).read(text)
    return imported_of(kind, output, context)


@dataclass(slots=True)
class _Table:
    """One table and what was printed around it, while it is read."""

    line: int = 0
    """Of its header; 0 before it."""
    programs: list[str] = field(default_factory=list)
    """What the program says of itself."""
    mentions: list[str] = field(default_factory=list)
    """Programs in other lines, such as the shell's."""
    ranks: list[tuple[int, int, int]] = field(default_factory=list)
    """(line, rank, group)."""
    devices: list[str] = field(default_factory=list)
    stated_ranks: set[int] = field(default_factory=set)
    """Numbers after `nranks`: of NCCL's log, or of a line that a user added."""
    counts: dict[str, int] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    in_place_only: bool = False
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ended: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def first_time(self) -> int:
        """Position of the first column of times."""
        return next(at for at, name in enumerate(self.columns) if name in ("time", "cputime"))


class _Reader:
    """Reads the printed form, one line after the other."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.tables = [_Table()]
        self.version = ""
        self.library = ""
        self.failure = ""
        """The first line with which the program itself says that it failed."""
        self.next_mentions: list[str] = []
        """Programs mentioned since the last table began; a shell's line comes before its run."""

    def read(self, text: str) -> Output:
        for each in text_lines(text):
            self.line(Line(number=each.number, text=without_rank_label(each.text)))
        tables = [table for table in self.tables if table.line]
        if self.failure and not any(table.rows for table in tables):
            message = f"no row of results; the program says {shown(self.failure)}"
            raise fault_at(self.file, 0, message)
        devices = [device for table in tables for device in table.devices]
        return Output(
            runs=tuple(_run(table, self.file) for table in tables),
            version=", ".join(part for part in (self.version, self.library) if part),
            device=devices[0] if devices else "",
        )

    def line(self, line: Line) -> None:
        text, table = line.text, self.tables[-1]
        found = _NRANKS.search(text)
        if found and int(found.group(1)) and not table.line:
            table.stated_ranks.add(int(found.group(1)))
        if text.lstrip().startswith("#") or "ccl-tests" in text[:40]:
            self.comment(line)
        elif _ROW.match(text):
            self.row(line)
        elif table.line and not table.ended and _is_almost_a_row(text, len(table.columns)):
            message = f"found {shown(text)}; a row begins with bytes and count"
            raise fault_at(self.file, line.number, message)
        else:
            self.remember(text)

    def remember(self, text: str) -> None:
        """Keep what a line of a log or a shell says about the run that it belongs to."""
        library, failure = _LIBRARY_LINE.search(text), _FAILURE.search(text)
        if library and not self.library:
            self.library = " ".join(library.groups())
        if failure and not self.failure:
            self.failure = failure.group()
        names = program_names(text)
        if names and self.tables[-1].line:
            self.next_mentions = names
        else:
            self.tables[-1].mentions += names

    def begin(self) -> _Table:
        self.tables.append(_Table(mentions=self.next_mentions))
        self.next_mentions = []
        return self.tables[-1]

    def comment(self, line: Line) -> None:
        text, table = line.text.strip(), self.tables[-1]
        rank, version = _RANK.match(text), _VERSION.match(text)
        settings = text.startswith("# nThread")
        starts = settings or version or "Collective test starting" in text
        if table.line and (starts or (rank and rank.group(1) == "0")):
            table = self.begin()
        words = text.lstrip("#").split()
        if rank:
            table.ranks.append((line.number, int(rank.group(1)), int(rank.group(2) or 0)))
            table.devices.append(rank.group(4).strip())
        elif {"algbw", "busbw"} <= set(words):
            self.header(line, words)
        elif words and set(words) <= {"out-of-place", "in-place", "(+", "per-iteration)"}:
            self.halves(line, words)
        elif "Collective test" in text:
            table.programs += program_names(text)
            table.ended |= "concluded" in text
        elif text.startswith(("# Out of bounds values", "# Avg bus bandwidth")):
            table.ended = True
            if "FAILED" in text:
                message = f"the program says FAILED for values of the table of line {table.line}"
                table.notes.append(message)
        else:
            table.mentions += program_names(text)
            if settings:
                table.counts = {name: int(value) for name, value in _COUNTS.findall(text)}
            if text.startswith("# Blocking Enabled"):
                table.notes.append("the processor waited after each operation (-z)")
            self.versions(text, version)

    def versions(self, text: str, version: re.Match[str] | None) -> None:
        library = _LIBRARY.search(text)
        if version and not self.version:
            self.version = version.group(1)
        if library and not self.library:
            name = "RCCL" if "rccl" in text else "NCCL"
            self.library = f"{name} {version_words(int(library.group(1)))}"

    def halves(self, line: Line, words: list[str]) -> None:
        """The line above the header says which halves a row has, and in which order."""
        if words[0] == "in-place" and "out-of-place" in words:
            # Other programs copy the table with the halves exchanged; nothing else would tell.
            message = "in-place stands before out-of-place; this is another program's table"
            raise fault_at(self.file, line.number, message)
        table = self.begin() if self.tables[-1].line else self.tables[-1]
        table.in_place_only = "out-of-place" not in words

    def header(self, line: Line, words: list[str]) -> None:
        table = self.begin() if self.tables[-1].line else self.tables[-1]
        names = [word.removeprefix("#") for word in words]
        fixed = [name for name in names if name in ("size", "count", "type")]
        if fixed != ["size", "count", "type"] or not {"time", "cputime"} & set(names):
            found = shown(" ".join(words))
            message = f"the header names {found}; size, count, type and time are expected"
            raise fault_at(self.file, line.number, message)
        table.columns, table.line = names, line.number

    def row(self, line: Line) -> None:
        table = self.tables[-1]
        if not table.line or table.ended:
            message = (
                "a row of results without the header `# size count type ... time algbw busbw` "
                "before it; give the whole output of a run"
            )
            raise fault_at(self.file, line.number, message)
        names = [name for name in table.columns if name not in _TAIL]
        tokens = _with_operator(line.text.split(), names)
        first = table.first_time
        half = (len(names) - first) // sum(name in ("time", "cputime") for name in names)
        if table.in_place_only or (
            len(tokens) == len(names) - half and _BLANK_HALF.search(line.text)
        ):
            table.skipped.append(f"line {line.number}: in-place only")
            return
        if "CCL " in line.text or len(tokens) <= first:
            message = "the row ends before its times: NCCL's own log cuts it, or the file ends"
            raise fault_at(self.file, line.number, f"{message}; run again without NCCL_DEBUG")
        if len(tokens) < len(names):
            message = f"the row has {len(tokens)} of {len(names)} columns; the output was cut off"
            raise fault_at(self.file, line.number, message)
        again = [at for at in range(first + 1, len(names)) if names[at] in ("time", "cputime")]
        cells = dict(zip(names[: again[0] if again else None], tokens, strict=False))
        table.rows.append(_row(line.number, cells, _in_place_unchecked(names, tokens), self.file))


def _with_operator(tokens: list[str], names: Sequence[str]) -> list[str]:
    """The row with the word `none` where programs before 2022-09 left the operator blank."""
    at = names.index("redop") if "redop" in names else len(tokens)
    blank = len(tokens) > at and re.match(r"-?\d", tokens[at]) is not None
    return [*tokens[:at], "none", *tokens[at:]] if blank else tokens


def _is_almost_a_row(text: str, columns: int) -> bool:
    """Whether a line that is no row has almost as many numbers as one."""
    numbers = sum(finite_number(token) is not None for token in text.split())
    return "CCL " not in text and numbers >= max(4, (columns - 4) // 2)


def _row(line: int, cells: dict[str, str], unchecked: bool | None, file: str) -> Row:
    size, root = whole_number(cells["size"]) or 0, whole_number(cells.get("root", "-1"))
    texts = {name: cells.get(name, "") for name in ("time", "algbw", "busbw")}
    reason = CPU_TIME
    if "cputime" not in cells:
        reason = why_unusable(size, texts, cells.get("wrong", "N/A"), file, line)
    return Row(
        line=line,
        message_bytes=size,
        dtype=cells["type"],
        reduces=cells.get("redop", "none") != "none",
        rooted=root is not None and root >= 0,
        wrong=reason,
        in_place_unchecked=unchecked,
        figures=figures(texts, rounding_of),
    )


def _in_place_unchecked(names: Sequence[str], tokens: Sequence[str]) -> bool | None:
    """Whether only the in-place half is unchecked; None where no half is, or a column says the
    error itself, as before in-place all-to-all was exempted.
    """
    if names[-1] != "wrong" or names.count("wrong") != 2:
        return None
    first, last = tokens[names.index("wrong")], tokens[len(names) - 1]
    return None if first.upper() == "N/A" or "e" in first else last.upper() == "N/A"


def _run(table: _Table, file: str) -> Run:
    """The table as a run; an InputError where its program or its ranks contradict themselves."""
    programs = dict.fromkeys(table.programs or table.mentions[-1:])
    if len({plain_name(name) for name in programs}) > 1:
        message = (
            f"one table of {' and '.join(programs)}: outputs of several programs are mixed; give "
            "one file per program"
        )
        raise fault_at(file, table.line, message)
    size, groups = _group_size(table, file)
    return without_lone_ranks(
        Run(
            line=table.line,
            program=next(iter(programs), ""),
            group_size=size,
            iterations=table.counts.get("iters", 0),
            rows=tuple(table.rows),
            notes=(*_notes(table, groups), *table.notes),
            skipped=tuple(table.skipped),
        )
    )


def _notes(table: _Table, groups: int) -> Iterator[str]:
    yield from run_notes(groups, table.counts.get("agg iters", 1), table.counts.get("graph", 0))
    if not table.ended:
        yield f"the table of line {table.line} has no end; the run may have failed"
    if len(set(table.devices)) > 1:
        yield f"devices: {', '.join(sorted(set(table.devices)))}"


def _group_size(table: _Table, file: str) -> tuple[int, int]:
    """(ranks of rank 0's group, number of groups)."""
    stated = min(table.stated_ranks) if len(table.stated_ranks) == 1 else 0
    lines: dict[int, int] = {}
    for line, rank, _ in table.ranks:
        if rank in lines:
            message = (
                f"rank {rank} is already on line {lines[rank]}: outputs of several runs are mixed "
                "(nccl-tests needs `make MPI=1` to join processes); give one file per run"
            )
            raise fault_at(file, line, message)
        lines[rank] = line
    if stated and stated > max(lines, default=-1):
        return stated, 1  # lines of ranks were left out
    missing = next((rank for rank in range(max(lines, default=0) + 1) if rank not in lines), None)
    if missing is not None:
        message = (
            f"the `# Rank` line of rank {missing} is missing before this table, so the number of "
            "ranks is unknown; give the whole output, or add a line `# nranks 16` with the number"
        )
        raise fault_at(file, table.line, message)
    groups = Counter(group for _, _, group in table.ranks)
    own = next(group for _, rank, group in table.ranks if rank == 0)
    return groups[own], len(groups)
