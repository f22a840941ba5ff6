"""Reading telemetry (`hetplan.runtime.telemetry` has the form) and checking that it is of a run.

A file is CSV or, where its name ends in .json, JSON; a folder of a run has one CSV file per rank.
A last line without a line break was torn by a kill, or is being written: it is left for later.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hetplan.cluster.hosts import node_name
from hetplan.cluster.places import unknown
from hetplan.cluster.spec import Island
from hetplan.errors import Fault, InputError
from hetplan.files.reading import decode, read_document, text_of
from hetplan.launchers.run_folder import RunFolder
from hetplan.plans.plan import expand
from hetplan.runtime.telemetry import COLUMNS, SCHEMA, Record
from hetplan.runtime.training import SCHEMA as TRAINING_SCHEMA
from hetplan.runtime.training import Training
from hetplan.search.result import SearchResult

_MOST_FAULTS = 20  # lines that a person reads
_BEYOND = 1e18  # no second or byte of a run reaches it
_KINDS = {"source": str, "target": str, "part": str, "rank": int, "step": int}
_TIMES = ("begin_seconds", "window_seconds")
_OVERLAP = 1e-3  # of a window: clocks that are read twice differ by less
Placed: TypeAlias = tuple[Record, str, int]
"""A record, and the file and line where it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryFile:
    """The content of a JSON file."""

    records: tuple[Record, ...]


class RankWork(NamedTuple):
    """A rank of the plan; what ranks of equal work have in common; its predicted seconds."""

    host: str
    kind: str
    work: tuple[object, ...]
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What telemetry of a plan's run can name: ranks in the order in which the plan names its
    devices, islands by node, and steps, where their number is known.
    """

    result: SearchResult
    ranks: tuple[RankWork, ...]
    islands: Mapping[str, Island]
    steps: int | None

    @staticmethod
    def node_of(end: str) -> str:
        """The node of an end, which may be one of its NICs."""
        return end.partition("/")[0]

    @classmethod
    def of(cls, result: SearchResult, folder: Path | None = None) -> Run:
        """The run of this plan that has this folder, or any; InputError where it is another's."""
        cluster, job = result.inputs.cluster, result.inputs.job
        steps = None
        if job.total_tokens is not None:
            steps = math.ceil(job.total_tokens / (job.global_batch_size * job.sequence_length))
        if folder is not None and (file := RunFolder(folder).training).exists():
            training = decode(read_document(file), Training, schema=TRAINING_SCHEMA)
            if training.plan != result.plan:
                raise InputError(Fault(file=str(file), field="plan", message="is another plan"))
            steps = training.steps
        nodes = {node_name(each, at): each for each in cluster.islands for at in range(each.nodes)}
        return cls(result=result, ranks=tuple(_ranks(result)), islands=nodes, steps=steps)


def _ranks(result: SearchResult) -> Iterator[RankWork]:
    cluster, costs = result.inputs.cluster, iter(result.estimate.stages)
    for pipeline in result.plan.pipelines:
        for stage in pipeline.stages:
            cost = next(costs)
            communication = cost.tensor_parallel_seconds * pipeline.num_microbatches
            for replica in stage.replicas:
                for device in expand(replica.devices):
                    island = cluster.island_of_device(device)
                    yield RankWork(
                        host=node_name(island, cluster.node_of_device(device)),
                        kind=island.device.kind,
                        work=(id(stage), island.device.kind, replica.tp, replica.microbatch_size),
                        compute_seconds=max(0.0, cost.busy_seconds - communication),
                    )


# ---- files


@dataclass(slots=True)
class Tail:
    """A CSV file that may still grow, read from where it was left."""

    path: Path
    offset: int = 0
    lines: int = 0
    names: tuple[str, ...] = ()

    def more(self) -> Iterator[Placed]:
        """Records of the whole lines that are new; InputError at the first that is none."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
            data = data[: data.rfind(b"\n") + 1]
            text = text_of(str(self.path), data) if data else ""
            rows = list(csv.reader(io.StringIO(text, newline="")))
        except (OSError, csv.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise self._fault("", f"cannot be read: {why}") from error
        self.offset += len(data)
        for row in rows:
            self.lines += 1
            if not self.names:
                for name in row:
                    if name not in COLUMNS or row.count(name) > 1:
                        raise self._fault(name, unknown(name, COLUMNS, "or repeated column"))
                for name in _TIMES:
                    if name not in row:
                        raise self._fault(name, "this column is missing; every row needs it")
                self.names = tuple(row)
            elif len(row) != len(self.names):
                raise self._fault("", f"found {len(row)} cells; the header has {len(self.names)}")
            else:
                yield self._record(row), str(self.path), self.lines

    def _record(self, row: Sequence[str]) -> Record:
        values: dict[str, Any] = dict.fromkeys(_TIMES, math.nan)
        for name, cell in zip(self.names, row, strict=True):
            try:
                values |= {name: _KINDS.get(name, float)(cell)} if cell else {}
            except ValueError:
                wanted = "a whole number" if name in _KINDS else "a number"
                raise self._fault(name, f"found {cell[:40]!a}; write {wanted}") from None
        return Record(**values)

    def _fault(self, name: str, message: str) -> InputError:
        file, name = str(self.path), name[:40]
        return InputError(Fault(file=file, line=self.lines, field=name, message=message))


def tails_of(folder: Path) -> list[Tail]:
    """The files of a run's folder."""
    return [Tail(path) for path in sorted(folder.glob("rank-*.telemetry"))]


def read_telemetry(paths: Sequence[Path], run: Run) -> list[Record]:
    """The records of these files and folders; an InputError where one is not of the run."""
    placed: list[Placed] = []
    for path in paths:
        if path.suffix.lower() == ".json":
            document = read_document(path)
            for at, each in enumerate(decode(document, TelemetryFile, schema=SCHEMA).records):
                placed.append((each, str(path), document.line(("records", at))))
        else:
            for tail in tails_of(path) if path.is_dir() else [Tail(path)]:
                placed += tail.more()
    if not placed:
        raise InputError(f"no record of telemetry in {', '.join(map(str, paths))}")
    return check(placed, run, {})


# ---- whether they are of the run


def check(
    placed: Sequence[Placed], run: Run, ends: dict[tuple[str, str, int | None, str], float]
) -> list[Record]:
    """The records, or an InputError with the first faults; `ends` remembers the windows so far."""
    wrong = [(each, *found) for each in placed for found in _wrong(each[0], run)]
    faults = [
        Fault(file=file, line=line, field=name, message=message)
        for (_, file, line), name, message in (wrong or list(_overlaps(placed, ends)))
    ]
    if faults:
        raise InputError(*faults[:_MOST_FAULTS])
    return [record for record, _, _ in placed]


def _wrong(record: Record, run: Run) -> Iterator[tuple[str, str]]:
    """(field, message) of what is wrong with one record by itself."""
    for name in COLUMNS:
        value = getattr(record, name)
        if isinstance(value, float | int) and not 0 <= value < _BEYOND:
            yield name, f"found {value!s:.40}; write a number from 0 on"
    if not record.window_seconds > 0:
        yield "window_seconds", "found 0; a window has a length"
    for name in ("source", "target"):
        node = run.node_of(getattr(record, name))
        if node and node not in run.islands:
            yield name, f"{unknown(node, run.islands, 'node')}: is this another run's?"
    if record.rank is not None and record.rank >= len(run.ranks):
        yield "rank", f"found {record.rank}; the plan has {len(run.ranks)} ranks, from 0"
    if record.step is not None and run.steps is not None and record.step >= run.steps:
        yield "step", f"found {record.step}; the run has {run.steps} steps, from 0"
    is_flow = bool(record.source or record.target)
    for name in ("bytes",) if is_flow else ("rank", "step", "part", "seconds"):
        if getattr(record, name) in (None, ""):
            what = "a flow or port (source or target)" if is_flow else "a timer"
            yield name, f"found nothing; {what} needs it"
    if (record.busy_seconds or 0.0) > record.window_seconds * (1 + _OVERLAP):
        yield "busy_seconds", "is longer than the window"


def _overlaps(
    placed: Sequence[Placed], ends: dict[tuple[str, str, int | None, str], float]
) -> Iterator[tuple[Placed, str, str]]:
    for each in sorted(placed, key=lambda one: one[0].begin_seconds):
        flow, begin, length = each[0].flow, each[0].begin_seconds, each[0].window_seconds
        if begin < ends.get(flow, -math.inf) - _OVERLAP * length:
            yield each, "begin_seconds", "the window overlaps another one of this flow or timer"
        ends[flow] = max(ends.get(flow, -math.inf), begin + length)
