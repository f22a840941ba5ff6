"""One table of nccl-tests and what was printed around it, while it is read, and as a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetplan.importers.collectives import Row, Run, count_of, plain_name
from hetplan.importers.lines import Line, fault_at


@dataclass(slots=True)
class Section:
    """A run while it is read."""

    line: int
    programs: list[str] = field(default_factory=list)
    mentions: list[str] = field(default_factory=list)
    ranks: list[tuple[int, int, int]] = field(default_factory=list)
    """(line, rank, group)."""
    devices: list[str] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    """Numbers after `nranks` before the table: of NCCL's log, or of a line that a user added."""
    counts: dict[str, int] = field(default_factory=dict)
    blocking: bool = False
    columns: list[str] = field(default_factory=list)
    header_line: int = 0
    in_place_only: bool = False
    milliseconds: bool = False
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    half_row: tuple[Line, list[str]] | None = None
    half_names: str = ""
    open: bool = False
    ended: bool = False
    out_of_bounds: bool = False


def library_version(code: int) -> str:
    """NCCL_VERSION_CODE as words: 22703 is 2.27.3, 2708 is 2.7.8 (nccl.h changed it at 2.9)."""
    big, small = (10000, 100) if code >= 10000 else (1000, 100)
    return f"{code // big}.{code % big // small}.{code % small}"


def run_of(section: Section, file: str) -> Run:
    """The run; an InputError where its program or its ranks contradict themselves."""
    said = dict.fromkeys(section.programs or section.mentions[-1:])
    if len({plain_name(name) for name in said}) > 1:
        raise fault_at(
            file,
            section.header_line,
            f"one table of {' and '.join(said)}: outputs of several programs are mixed; give one "
            "file per program",
        )
    size, groups = _group_size(section, file)
    rows, skipped = section.rows, list(section.skipped)
    if size == 1 and rows:
        skipped.append(
            f"line {rows[0].line}: {count_of(len(rows))} of one rank, which uses no link; "
            "nccl-tests needs `make MPI=1` to join processes"
        )
        rows = []
    return Run(
        line=section.header_line,
        program=next(iter(said), ""),
        group_size=size,
        iterations=section.counts.get("iters", 0),
        rows=tuple(rows),
        notes=tuple(_notes(section, groups)),
        skipped=tuple(skipped),
        first_version=section.milliseconds,
    )


def _notes(section: Section, groups: int) -> Iterator[str]:
    counts = section.counts
    if groups > 1:
        yield f"{groups} groups worked at the same time"
    if counts.get("agg iters", 1) > 1:
        yield f"{counts['agg iters']} operations were started together (-m); time is of one"
    if counts.get("graph", 0) > 0:
        yield "operations were replayed from a graph (-G), without launches"
    if section.blocking:
        yield "the processor waited after each operation (-z)"
    if not section.ended:
        yield f"the table of line {section.header_line} has no end; the run may have failed"
    if section.out_of_bounds:
        yield f"the program says FAILED for values of the table of line {section.header_line}"
    if len(set(section.devices)) > 1:
        yield f"devices: {', '.join(sorted(set(section.devices)))}"


def _group_size(section: Section, file: str) -> tuple[int, int]:
    """(ranks of rank 0's group, number of groups)."""
    told = min(section.sizes) if len(section.sizes) == 1 else 0
    if not section.ranks:
        if told:
            return told, 1
        raise fault_at(
            file,
            section.header_line,
            "no `# Rank` lines before this table, so nobody knows how many ranks took part; give "
            "the whole output of the run, or add a line `# nranks 16` with the number before it",
        )
    places: dict[int, int] = {}
    for line, rank, _ in section.ranks:
        if rank in places:
            raise fault_at(
                file,
                line,
                f"rank {rank} is already on line {places[rank]}: outputs of several runs are mixed "
                "(nccl-tests needs `make MPI=1` to join processes); give one file per run",
            )
        places[rank] = line
    if told > max(places):
        return told, 1  # somebody left lines out
    missing = next(rank for rank in range(len(places) + 1) if rank not in places)
    if missing < len(places):
        message = (
            f"the line of rank {missing} is missing; add it, or a line `# nranks 16` with the "
            "number of ranks"
        )
        raise fault_at(file, section.ranks[0][0], message)
    groups = Counter(group for _, _, group in section.ranks)
    own = next(group for _, rank, group in section.ranks if rank == 0)
    return groups[own], len(groups)
