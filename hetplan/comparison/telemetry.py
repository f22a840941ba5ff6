"""Reading telemetry (`hetplan.runtime.telemetry` has the form) and checking that it is of a run.

A file is CSV or, where its name ends in .json, JSON; a folder of a run has one CSV file per rank.
A last line without a line break was torn by a kill, or is being written: it is left for later.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hetplan.cluster.hosts import node_name
from hetplan.cluster.places import unknown
from hetplan.cluster.spec import Island
from hetplan.errors import Fault, InputError
from hetplan.files.reading import decode, document_of, pydantic_message, read_bytes, text_of
from hetplan.plans.plan import expand
from hetplan.runtime.telemetry import COLUMNS, SCHEMA, Record
from hetplan.search.result import SearchResult

_MOST_FAULTS = 20
_OVERLAP = 1e-3
"""Of a window: clocks that are read twice differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryFile:
    """The content of a JSON file."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A record, and where it was read."""

    record: Record
    file: str
    line: int

    def fault(self, name: str, message: str) -> Fault:
        """What is wrong with one of its fields."""
        return Fault(file=self.file, line=self.line, field=name, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """A rank of the plan, and what it has to compute in a step."""

    rank: int
    host: str
    kind: str
    work: tuple[object, ...]
    """Ranks of equal work have it in common."""
    compute_seconds: float
    """Predicted, communication left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What telemetry of a plan's run can name."""

    result: SearchResult
    ranks: tuple[RankWork, ...]
    """In the order in which the plan names its devices."""
    islands: Mapping[str, Island]
    """By node."""
    steps: int | None
    """None: not known."""

    @classmethod
    def of(cls, result: SearchResult, steps: int | None = None) -> Run:
        """A run of this plan; `steps` where they are not those of the job."""
        cluster, job = result.inputs.cluster, result.inputs.job
        if steps is None and job.total_tokens is not None:
            steps = math.ceil(job.total_tokens / (job.global_batch_size * job.sequence_length))
        names = {
            node_name(island, node): island
            for island in cluster.islands
            for node in range(island.nodes)
        }
        return cls(result=result, ranks=tuple(_ranks(result)), islands=names, steps=steps)


def _ranks(result: SearchResult) -> Iterator[RankWork]:
    cluster, number, stage_number = result.inputs.cluster, 0, 0
    for pipeline in result.plan.pipelines:
        for stage in pipeline.stages:
            cost = result.estimate.stages[stage_number]
            communication = cost.tensor_parallel_seconds * pipeline.num_microbatches
            for replica in stage.replicas:
                shape = (replica.tp, replica.cp, replica.ep, replica.etp, replica.microbatch_size)
                for device in expand(replica.devices):
                    island = cluster.island_of_device(device)
                    yield RankWork(
                        rank=number,
                        host=node_name(island, cluster.node_of_device(device)),
                        kind=island.device.kind,
                        work=(stage_number, island.device.kind, shape),
                        compute_seconds=max(0.0, cost.busy_seconds - communication),
                    )
                    number += 1
            stage_number += 1


# ---- files


@dataclass(slots=True)
class Tail:
    """A CSV file that may still grow, read from where it was left."""

    path: Path
    offset: int = 0
    lines: int = 0
    names: tuple[str, ...] = ()

    def more(self) -> list[Placed]:
        """Records of the whole lines that are new; InputError with every fault."""
        with _open(self.path) as stream:
            stream.seek(self.offset)
            data = stream.read()
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        text = text_of(str(self.path), data) if data else ""
        try:
            rows = list(csv.reader(io.StringIO(text, newline="")))
        except csv.Error as error:
            fault = Fault(file=str(self.path), line=self.lines + 1, message=f"is no CSV: {error}")
            raise InputError(fault) from error
        first = self.lines + 1
        self.lines += len(rows)
        if rows and not self.names:
            self.names = self._header(rows.pop(0))
            first += 1
        return list(self._records(rows, first))

    def _header(self, names: Sequence[str]) -> tuple[str, ...]:
        wrong = next((name for name in names if name not in COLUMNS), None)
        if wrong is not None:
            message = unknown(wrong, COLUMNS, "column")
        elif len(set(names)) < len(names) or not {"begin_seconds", "window_seconds"} <= set(names):
            message = "the header needs begin_seconds and window_seconds, and every name once"
        else:
            return tuple(names)
        raise InputError(Fault(file=str(self.path), line=1, field="header", message=message))

    def _records(self, rows: Sequence[Sequence[str]], first: int) -> Iterator[Placed]:
        faults = [
            Fault(
                file=str(self.path),
                line=number,
                message=f"found {len(cells)} columns, the header has {len(self.names)}",
            )
            for number, cells in enumerate(rows, start=first)
            if len(cells) != len(self.names)
        ]
        if faults:
            raise InputError(*faults[:_MOST_FAULTS])
        data = [
            {name: cell for name, cell in zip(self.names, cells, strict=True) if cell}
            for cells in rows
        ]
        try:
            records = _adapter().validate_python(data)
        except ValidationError as error:
            raise InputError(
                *(
                    Fault(
                        file=str(self.path),
                        line=first + int(detail["loc"][0]),
                        field=str(detail["loc"][-1]),
                        message=pydantic_message(detail),
                    )
                    for detail in error.errors()[:_MOST_FAULTS]
                )
            ) from error
        for at, record in enumerate(records):
            yield Placed(record=record, file=str(self.path), line=first + at)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(tuple[Record, ...])


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise InputError(Fault(file=str(path), message=message)) from error


def tails_of(folder: Path) -> list[Tail]:
    """The files of a run's folder."""
    return [Tail(path=path) for path in sorted(folder.glob("rank-*.telemetry"))]


def read_telemetry(paths: Sequence[Path], run: Run) -> tuple[Record, ...]:
    """The records of these files and folders; an InputError where one is not of the run."""
    placed: list[Placed] = []
    for path in paths:
        if path.is_dir():
            tails = tails_of(path)
            if not tails:
                raise InputError(f"{path} has no rank-N.telemetry: it is no folder of a run")
            placed += [record for tail in tails for record in tail.more()]
        elif path.suffix.lower() == ".json":
            placed += _of_json(path)
        else:
            placed += Tail(path=path).more()
    Checks(run).check(placed)
    if not placed:
        raise InputError(f"no record in {', '.join(map(str, paths))}")
    return tuple(each.record for each in placed)


def _of_json(path: Path) -> Iterator[Placed]:
    document = document_of(str(path), read_bytes(path))
    records = decode(document, TelemetryFile, schema=SCHEMA).records
    for at, record in enumerate(records):
        yield Placed(record=record, file=str(path), line=document.line(("records", at)))


# ---- whether they are of the run


@dataclass(slots=True)
class Checks:
    """What telemetry must fulfil; it remembers the windows that it has seen."""

    run: Run
    _windows: dict[tuple[object, ...], float] = field(default_factory=dict)
    _timers: set[tuple[object, ...]] = field(default_factory=set)

    def check(self, placed: Sequence[Placed]) -> None:
        """An InputError with the first faults of these records."""
        faults = [each.fault(*wrong) for each in placed for wrong in self._wrong(each.record)]
        if not faults:
            faults = list(self._overlaps(placed))
        if faults:
            raise InputError(*faults[:_MOST_FAULTS])

    def _wrong(self, record: Record) -> Iterator[tuple[str, str]]:
        """(field, message) of what is wrong with one record by itself."""
        for name in COLUMNS:
            value = getattr(record, name)
            if isinstance(value, float | int) and not 0 <= value < math.inf:
                yield name, f"found {value:g}; it must be a number from 0 on"
        if not record.window_seconds > 0:
            yield "window_seconds", "found 0; a window has a length"
        ends = (("source", record.source_nic), ("target", record.target_nic))
        for name, nic in ends:
            yield from self._wrong_end(name, getattr(record, name), nic)
        if record.rank is not None and record.rank >= len(self.run.ranks):
            yield "rank", f"found {record.rank}; the plan has {len(self.run.ranks)} ranks, from 0"
        steps = self.run.steps
        if record.step is not None and steps is not None and record.step >= steps:
            yield "step", f"found {record.step}; the run has {steps} steps, from 0"
        if record.source or record.target:
            if record.bytes is None:
                yield "bytes", "found nothing; a flow or a port needs its bytes"
            if record.source and record.source == record.target:
                yield "target", "is the source; what stays on a node is no flow"
            if (record.busy_seconds or 0.0) > record.window_seconds * (1 + _OVERLAP):
                yield "busy_seconds", "is longer than the window"
        else:
            for name in ("rank", "step", "seconds"):
                if getattr(record, name) is None:
                    yield name, "found nothing; name source or target, or rank, step and seconds"
            if not record.part:
                yield "part", "found nothing; say what the seconds are of, as `compute`"

    def _wrong_end(self, name: str, node: str, nic: int | None) -> Iterator[tuple[str, str]]:
        if node and node not in self.run.islands:
            yield name, f"{unknown(node, self.run.islands, 'node')}: is this another run's?"
        elif nic is not None:
            island = self.run.islands.get(node)
            count = island.nics.per_node if island is not None and island.nics is not None else None
            if not node or (count is not None and nic >= count):
                has = f"the node has {count} NICs" if node else f"there is no {name} to have it"
                yield f"{name}_nic", f"found {nic}; {has}"

    def _overlaps(self, placed: Sequence[Placed]) -> Iterator[Fault]:
        for each in sorted(placed, key=lambda one: one.record.begin_seconds):
            record = each.record
            if not record.source and not record.target:
                timer = (record.rank, record.step, record.part)
                if timer in self._timers:
                    yield each.fault("part", f"a second time of this part in step {record.step}")
                self._timers.add(timer)
                continue
            begin, end = record.begin_seconds, record.begin_seconds + record.window_seconds
            before = self._windows.get(record.flow, -math.inf)
            if begin < before - _OVERLAP * record.window_seconds:
                yield each.fault("begin_seconds", "the window overlaps another one of this flow")
            self._windows[record.flow] = max(before, end)
