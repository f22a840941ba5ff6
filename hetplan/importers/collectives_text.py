"""Printed output of nccl-tests and rccl-tests to runs: one per table, any number per file.

What is read (`src/common.cu` and `src/util.cu` of both, 2017 to 2026):

    # Collective test starting: all_reduce_perf           since 2025
    # nThread 1 nGpus 8 ... iters: 20 agg iters: 1 ...    since 2019
    #  Rank  0 Group  0 Pid 41 on node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
    #       size         count      type   redop    root     time   algbw   busbw #wrong ...
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)        ...
         1048576        262144     float     sum      -1    61.52   17.05   29.83      0 ...

Columns are found by their names, so optional ones (hipevt, i_min, algo) do not matter; versions
before 2019 say `bytes`, `N`, `op` and print milliseconds. Lines of NCCL's own log may stand
anywhere, also between the two halves of a row, and every line may carry a launcher's rank. Pages
show the output without its `#`, because that is how they mark a heading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.importers.collectives import Figure, Row, Run, program_names
from hetplan.importers.collectives_section import Section, library_version, run_of
from hetplan.importers.lines import (
    Line,
    fault_at,
    finite_number,
    rounding_of,
    shown,
    whole_number,
    without_rank_label,
)

_RANK = re.compile(
    r"(?:#\s{0,20})?Rank\s{1,20}(\d{1,9}) (?:Group\s{1,20}(-?\d{1,12}) )?(?:Pid\s{1,20}\d{1,12} )?"
    r"on\s{1,30}(\S{1,1024}) device\s{1,20}\d{1,9} \[[^\]]{0,60}\] ?(.{0,200})",
    re.ASCII,
)
_COUNTS = re.compile(r"\b(warmup iters|iters|agg iters|graph):\s{0,4}(\d{1,9})", re.ASCII)
_VERSION = re.compile(r"(?:#\s?)?[nr]ccl-tests(?:: Version| version) (\S{1,60})", re.ASCII)
_LIBRARY = re.compile(r"[nr]ccl-library=(\d{4,6})", re.ASCII)
_LIBRARY_LINE = re.compile(r"\b([NR]CCL) version\s?: ?(\S{1,40})|\b([NR]CCL) version (\S{1,40})")
_ROW = re.compile(r"\s{0,40}\d{1,18}\s{1,40}\d{1,18}\s{1,40}[A-Za-z]\w{0,20}(?:\s|$)", re.ASCII)
_FAILURE = re.compile(r"Test (?:NCCL|RCCL|CUDA|HIP|failure|timeout)[ -~]{0,120}")
_BLANK_HALF = 24  # columns; an omitted half of a row is 32 spaces, the widest other gap is 9
_COLUMN_NAMES = {"bytes": "size", "N": "count", "op": "redop", "res": "wrong", "error": "wrong"}
# Versions before 2019 print these without `#`.
_UNMARKED = ("nThread", "Out of bounds values", "Avg bus bandwidth")
_BARE = re.compile(
    r"\s{0,99}(?:Rank\s{1,20}\d{1,9} |(?:size|bytes)\s{1,20}(?:count|N)\s|(?:out-of|in)-place\b)"
)
_NRANKS = re.compile(r"\bnranks (\d{1,7})\b", re.ASCII)
_TAIL = ("timestamp", "algo", "proto", "nchannels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a file says."""

    runs: tuple[Run, ...]
    version: str
    device: str


def read_output(lines: Sequence[Line], file: str) -> Output:
    """Every run of a file."""
    reader = _Reader(file)
    for line in lines:
        reader.line(Line(number=line.number, text=without_rank_label(line.text)))
    reader.close_row()
    sections = [section for section in reader.sections if section.header_line]
    if reader.failure and not any(section.rows for section in sections):
        raise fault_at(file, 0, f"no row of results; the program says {shown(reader.failure)}")
    devices = [device for section in sections for device in section.devices]
    return Output(
        runs=tuple(run_of(section, file) for section in sections),
        version=", ".join(part for part in (reader.version, reader.library) if part),
        device=devices[0] if devices else "",
    )


class _Reader:
    """Goes through the lines once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.sections = [Section(line=1)]
        self.version = ""
        self.library = ""
        self.failure = ""
        """The first line with which the program itself says that it failed."""
        self.next_mentions: list[str] = []
        """Programs that were mentioned since the last table began."""
        self.next_sizes: set[int] = set()
        """Numbers of ranks that were."""

    def line(self, line: Line) -> None:
        text = line.text
        section = self.sections[-1]
        self.sizes(text)
        if (
            text.lstrip().startswith(("#", *_UNMARKED))
            or "ccl-tests" in text[:40]
            or _BARE.match(text)
        ):
            self.comment(line)
        elif _ROW.match(text):
            self.row(line)
        elif section.half_row is not None and self.completes(line):
            pass
        elif "ccl version" in text.lower() or "_perf" in text or "failure" in text:
            self.remember(text)
        elif section.open and _looks_like_a_row(text, len(section.columns)):
            raise fault_at(
                self.file, line.number, f"found {shown(text)}; a row begins with bytes and count"
            )

    def sizes(self, text: str) -> None:
        """Note what NCCL's log says of a communicator when it makes one."""
        found = _NRANKS.search(text) if "nranks" in text and "Destroy" not in text else None
        if found and int(found.group(1)):
            begun = self.sections[-1].header_line > 0
            (self.next_sizes if begun else self.sections[-1].sizes).add(int(found.group(1)))

    def remember(self, text: str) -> None:
        """What a line of a log or a shell says about the run that it belongs to."""
        found = _LIBRARY_LINE.search(text)
        if found and not self.library:
            self.library = " ".join(part for part in found.groups() if part)
        failure = _FAILURE.search(text)
        if failure and not self.failure:
            self.failure = failure.group()
        names = program_names(text)
        if names and self.sections[-1].header_line:
            # It may be a shell's line before the next run, or a launcher's within this one.
            self.next_mentions = names
        else:
            self.sections[-1].mentions += names

    def begin(self, number: int) -> Section:
        self.close_row()
        self.sections.append(
            Section(line=number, mentions=self.next_mentions, sizes=self.next_sizes)
        )
        self.next_mentions, self.next_sizes = [], set()
        return self.sections[-1]

    def comment(self, line: Line) -> None:
        text, section = line.text.strip(), self.sections[-1]
        rank = _RANK.match(text)
        starts = "Collective test starting" in text or text.removeprefix("# ").startswith("nThread")
        if section.header_line and (
            (starts or _VERSION.match(text)) or (rank and rank.group(1) == "0")
        ):
            section = self.begin(line.number)
        words = text.lstrip("#").split()
        if rank:
            section.ranks.append((line.number, int(rank.group(1)), int(rank.group(2) or 0)))
            section.devices.append(rank.group(4).strip())
        elif {"algbw", "busbw"} <= set(words):
            self.header(line, words)
        elif words and set(words) <= {"out-of-place", "in-place", "(+", "per-iteration)"}:
            section.half_names = text
        elif "(GB/s)" in words and section.header_line == line.number - 1:
            section.milliseconds = "(ms)" in words
        elif "Collective test" in text:
            section.programs += program_names(text)
            section.ended |= "concluded" in text
        else:
            self.settings(text, section)

    def settings(self, text: str, section: Section) -> None:
        version, library = _VERSION.match(text), _LIBRARY.search(text)
        if version and not self.version:
            self.version = version.group(1)
        if library and not self.library:
            name = "RCCL" if "rccl" in text else "NCCL"
            self.library = f"{name} {library_version(int(library.group(1)))}"
        if text.removeprefix("# ").startswith("nThread"):
            section.counts = {name: int(value) for name, value in _COUNTS.findall(text)}
        section.blocking |= text.startswith("# Blocking Enabled")
        if text.removeprefix("# ").startswith(_UNMARKED[1:]):
            self.close_row()
            section.open, section.ended = False, True
            if "FAILED" in text and "bounds" in text:
                section.out_of_bounds = True
        section.mentions += program_names(text)

    def header(self, line: Line, words: list[str]) -> None:
        section = self.sections[-1]
        if section.header_line:
            section = self.begin(line.number)
        names = [_COLUMN_NAMES.get(word, word).removeprefix("#") for word in words]
        fixed = [name for name in names if name in ("size", "count", "type")]
        if fixed != ["size", "count", "type"] or not {"time", "cputime"} & set(names):
            raise fault_at(
                self.file,
                line.number,
                f"the header names {shown(' '.join(words))}; size, count, type and time are "
                "expected",
            )
        halves = section.half_names.lstrip("#").split()
        if halves[:1] == ["in-place"] and "out-of-place" in halves:
            # nccl-tests and rccl-tests print them the other way round; other programs copy their
            # table with the halves exchanged, and nothing else in a row would tell.
            message = "in-place stands before out-of-place; this is another program's table"
            raise fault_at(self.file, line.number - 1, message)
        section.columns, section.header_line, section.open = names, line.number, True
        section.milliseconds = "bytes" in words
        section.in_place_only = "in-place" in section.half_names.split() and (
            "out-of-place" not in section.half_names
        )

    def row(self, line: Line) -> None:
        section = self.sections[-1]
        self.close_row()
        if not section.open:
            raise fault_at(
                self.file,
                line.number,
                "a row of results without the header `# size count type ... time algbw busbw` "
                "before it; give the whole output of a run",
            )
        tokens = _with_operator(line.text.split(), section.columns)
        first = _first_time(section.columns)
        if len(tokens) <= first or "CCL " in line.text:
            # NCCL logs while it connects: between the two halves of a row, even within its line.
            root = _leading_number(tokens[first - 1 :])
            section.half_row = (line, [*tokens[: first - 1], root])
            return
        self.whole_row(line, tokens)

    def completes(self, line: Line) -> bool:
        """Whether the line is the other half of a row that a log message cut in two."""
        section = self.sections[-1]
        tokens = line.text.split()
        if section.half_row is None or not tokens or finite_number(tokens[0]) is None:
            return False
        begin, before = section.half_row
        section.half_row = None
        self.whole_row(begin, before + tokens)
        return True

    def close_row(self) -> None:
        half = self.sections[-1].half_row
        if half is not None:
            message = "the row ends before its times; the output was cut off here"
            raise fault_at(self.file, half[0].number, message)

    def whole_row(self, line: Line, tokens: list[str]) -> None:
        section = self.sections[-1]
        names = [name for name in section.columns if name not in _TAIL]
        first = _first_time(names)
        half = (len(names) - first) // max(1, sum(name in ("time", "cputime") for name in names))
        if section.in_place_only or (
            len(tokens) == len(names) - half and re.search(rf"\S\s{{{_BLANK_HALF},60}}", line.text)
        ):
            section.skipped.append(f"line {line.number}: in-place only")
            return
        if len(tokens) < len(names):
            raise fault_at(
                self.file,
                line.number,
                f"the row has {len(tokens)} of {len(names)} columns; the output was cut off here",
            )
        section.rows.append(_row(section, line, dict(_pairs(names, tokens)), tokens, self.file))


def _with_operator(tokens: list[str], names: Sequence[str]) -> list[str]:
    """The row with the word `none` where programs before 2022-09 left the operator blank."""
    if "redop" not in names:
        return tokens
    at = names.index("redop")
    blank = len(tokens) > at and re.match(r"-?\d", tokens[at]) is not None
    return [*tokens[:at], "none", *tokens[at:]] if blank else tokens


def _pairs(names: Sequence[str], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of the columns up to the out-of-place half's end."""
    first = _first_time(names)
    again = [at for at in range(first + 1, len(names)) if names[at] in ("time", "cputime")]
    end = again[0] if again else len(names)
    return list(zip(names[:end], tokens[:end], strict=True))


def _first_time(names: Sequence[str]) -> int:
    return next(at for at, name in enumerate(names) if name in ("time", "cputime"))


def _leading_number(tokens: Sequence[str]) -> str:
    """The root, to which a log message may be glued, as in `-1node7:41:77 [0] NCCL INFO`."""
    found = re.match(r"-?\d{1,9}", tokens[0]) if tokens else None
    return found.group() if found else (tokens[0] if tokens else "")


def _looks_like_a_row(text: str, columns: int) -> bool:
    """Whether a line that is no row has almost as many numbers as one."""
    tokens = text.split()
    numbers = sum(finite_number(token) is not None for token in tokens)
    return "CCL " not in text and numbers >= max(4, (columns - 4) // 2)


def _row(
    section: Section, line: Line, cells: dict[str, str], tokens: Sequence[str], file: str
) -> Row:
    size = whole_number(cells["size"])
    time_name = "time" if "time" in cells else "cputime"
    wrong = cells.get("wrong", "N/A")
    texts = (cells[time_name], cells.get("algbw", ""), cells.get("busbw", ""))
    values = [finite_number(text) for text in texts]
    reason = _why_unusable(size, time_name, texts, wrong, file, line.number)
    per_second = 1e3 if section.milliseconds else 1e6
    scales = (1 / per_second, 1e9, 1e9)
    figures = [
        Figure(value=(value or 0.0) * scale, half_step=rounding_of(text) * scale / 2)
        for value, text, scale in zip(values, texts, scales, strict=True)
    ]
    # Divided, so that 91.13 us is the float nearest to it.
    figures[0] = replace(figures[0], value=(values[0] or 0.0) / per_second)
    root = whole_number(cells.get("root", "-1"))
    return Row(
        line=line.number,
        message_bytes=size or 0,
        dtype=cells["type"],
        reduces=cells.get("redop", "none") != "none",
        rooted=root is not None and root >= 0,
        seconds=figures[0],
        algorithm_rate=figures[1],
        bus_rate=figures[2],
        wrong=reason,
        all_to_all=_only_in_place_unchecked(section, cells, tokens),
    )


def _why_unusable(
    size: int | None, time_name: str, texts: Sequence[str], wrong: str, file: str, line: int
) -> str:
    """Why a row must not be used; an InputError where it is not as the program prints it."""
    if time_name == "cputime":
        return "the time is the processor's own (-C), not the operation's"
    for text, name in zip(texts, ("time", "algbw", "busbw"), strict=True):
        value = finite_number(text)
        if value is None and text.lstrip("-+").lower() not in ("nan", "inf"):
            raise fault_at(file, line, f"found {shown(text)}; a number is expected here", name)
        if value is None or value < 0:
            return f"{name} is {text}"
    if not size:
        return "a message of no bytes"
    if (finite_number(texts[0]) or 0.0) / 1e6 == 0:
        return "the time is 0"
    if wrong.upper() != "N/A":
        count = finite_number(wrong)
        if count is None and wrong.lower().lstrip("-") not in ("nan", "inf"):
            message = f"found {shown(wrong)}; a number or N/A is expected here"
            raise fault_at(file, line, message, "#wrong")
        # Before 2022 the column held the largest relative error, which rounding makes small.
        if count is None or count >= 1:
            return f"{wrong} wrong elements"
    return ""


def _only_in_place_unchecked(
    section: Section, cells: dict[str, str], tokens: Sequence[str]
) -> bool | None:
    """Whether the in-place half is unchecked; None where no half was checked or a column says
    the error itself, as before in-place all-to-all was exempted.
    """
    names = [name for name in section.columns if name not in _TAIL]
    last = tokens[len(names) - 1] if names[-1] == "wrong" and names.count("wrong") == 2 else ""
    if not last or cells.get("wrong", "N/A").upper() == "N/A" or "e" in cells["wrong"]:
        return None
    return last.upper() == "N/A"
