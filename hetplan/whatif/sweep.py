"""A sweep is planned: questions to workers, rows to a CSV table as they come back.

A row is one write of one whole line, so that a table that was cut short by a kill ends in at most
one torn line, which is dropped when the sweep goes on. Questions that are in the table are not
asked again. A question that fails is a row with its reason, not the end of the sweep.

Questions that differ in their cluster alone hand each other their plans once all have an answer
(`exchanged`): a row that this makes better is written anew.

Workers are processes of this machine (joblib's loky), or those of a Dask or Ray cluster through
joblib's backend of that name.
"""

from __future__ import annotations

import csv
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from hetplan.deadline import check_time, ends_by, moment_in, seconds_left
from hetplan.errors import (
    Fault,
    HetplanError,
    InfeasibleError,
    InputError,
    LimitError,
    OutOfTimeError,
)
from hetplan.files.locks import Lock
from hetplan.files.reading import read_bytes
from hetplan.files.shipped import default_stores
from hetplan.files.writing import check_writable, make_folder, write_atomically
from hetplan.plans.plan import Plan
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import devices_in_use, layout_words
from hetplan.search.files import save_result
from hetplan.search.final_pricing import priced_start
from hetplan.search.result import Question, SearchResult
from hetplan.search.solver import RESOLUTION
from hetplan.search.table_maker import TableMaker
from hetplan.units import format_brief, format_rate, format_seconds
from hetplan.whatif.ask import NO_ANSWER, carried, first_line, is_interrupted
from hetplan.whatif.objectives import by_objective
from hetplan.whatif.smaller_questions import Answers, best_plan
from hetplan.whatif.sweep_grid import Point, Sweep, question


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one question; empty text where there is no such figure."""

    key: str
    model: str
    cluster: str
    job: str
    target: str
    global_batch_size: int
    sequence_length: int
    links: str
    nodes: str
    status: str
    """`optimal`, `limit` (with a plan, or without one in time), `open` (a wider gap than asked
    for, at the search's own end), `infeasible`, or `error`: the question contradicts itself."""
    step_seconds: str = ""
    tokens_per_second: str = ""
    gap: str = ""
    lower_bound_seconds: str = ""
    devices_in_use: str = ""
    layout: str = ""
    """Degrees in short."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def words(self) -> str:
        """For a line of progress."""
        found = format_brief(float(self.step_seconds)) if self.step_seconds else self.status
        batch = f"batch {self.global_batch_size}" if self.global_batch_size else ""
        length = f"{self.sequence_length} tokens" if self.sequence_length else ""
        asked = (
            self.model, self.cluster, self.job, self.target, batch, length, self.links, self.nodes,
        )  # fmt: skip
        return f"{', '.join(each for each in asked if each)}: {found}"


COLUMNS = tuple(each.name for each in fields(Row))


def check_fresh(path: Path, *, resume: bool) -> None:
    """An InputError where the table of an earlier sweep would be lost."""
    if not resume and path.exists() and path.stat().st_size > 0:
        message = "exists already; continue it with --resume, or name another file"
        raise InputError(Fault(file=str(path), message=message))


class Table:
    """The open table; rows of earlier runs stay. The caller has its lock."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        self._lines: dict[str, list[str]] = {}
        check_fresh(path, resume=not fresh)  # again, as nobody else can write it from here on
        if fresh or not path.exists():
            write_atomically(path, _line(COLUMNS))
        else:
            self._lines = {row[0]: row for row in self._mend()}
        self.done = frozenset(self._lines)
        self._file = path.open("a", encoding="utf-8", newline="")

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, row: Row) -> bool:
        """Write the row, whole, to the disk; False where one that is no worse is there."""
        cells = [str(getattr(row, name)) for name in COLUMNS]
        old = self._lines.get(row.key)
        if old is not None and _step(cells) >= _step(old):
            return False
        self._lines[row.key] = cells
        if old is None:
            self._file.write(_line(cells))
            self._file.flush()
            os.fsync(self._file.fileno())
            return True
        self._file.close()
        write_atomically(self._path, "".join(map(_line, [[*COLUMNS], *self._lines.values()])))
        self._file = self._path.open("a", encoding="utf-8", newline="")
        return True

    def _mend(self) -> list[list[str]]:
        """The whole rows; a torn last line is cut off."""
        text = read_bytes(self._path).decode("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            rows = list(csv.reader(io.StringIO(whole)))
        except csv.Error:
            rows = []
        if not text or (not whole and _line(COLUMNS).startswith(text)):
            # A kill before the first line was whole.
            write_atomically(self._path, _line(COLUMNS))
            return []
        if not rows or tuple(rows[0]) != COLUMNS:
            raise InputError(
                Fault(
                    file=str(self._path),
                    line=1,
                    message="is no table of a sweep of this version of hetplan; nothing was "
                    "changed: name another file with --out",
                )
            )
        good = [row for row in rows[1:] if _is_whole(row)]
        if whole != text or len(good) < len(rows) - 1:
            write_atomically(self._path, _line(COLUMNS) + "".join(map(_line, good)))
        return good


def _is_whole(cells: list[str]) -> bool:
    """Whether a row can be gone on from; others are asked again."""
    try:
        return len(cells) == len(COLUMNS) and _step(cells) > 0
    except ValueError:
        return False


def _step(cells: list[str]) -> float:
    """Seconds of a row's step; infinite where it has no plan."""
    return float(cells[COLUMNS.index("step_seconds")] or math.inf)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return buffer.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepContext:
    """What a worker needs beside the question."""

    predictor: Predictor
    plans: str | None
    """Folder for plan files; None: only the table."""
    parent: int | None = None
    """Process without which its workers end; None: they outlive it, as those of a cluster do."""
    ends_at: float = math.inf
    """When the sweep is over, by `time.time`: workers have clocks of their own."""

    @property
    def end(self) -> float:
        """The same by the clock of this process (`hetplan.deadline`)."""
        return math.inf if self.ends_at == math.inf else moment_in(self.ends_at - time.time())


def run_sweep(
    sweep: Sweep,
    table: Path,
    *,
    resume: bool = False,
    predictor: Predictor | None = None,
    digest: str = "",
    plans: Path | None = None,
    progress: Callable[[int, int, Row], None] | None = None,
) -> tuple[int, int]:
    """Plan every question that is not in the table yet; how many were planned, and left out.

    `digest` is of the predictor's text: rows of another one are asked again. InputError where the
    table is of something else, or where the backend that is named is not installed. Ctrl-C ends it
    with the rows that are done, and so does the end of the caller's time (`hetplan.deadline`).
    """
    if predictor is None:
        own, digest = fit_stores(*default_stores())
        predictor = with_shipped(own)
    asked = SweepContext(
        predictor=predictor,
        plans=None if plans is None else str(plans),
        parent=os.getpid() if sweep.backend == "processes" else None,
        ends_at=time.time() + seconds_left(),
    )
    points = tuple(replace(point, digest=point.digest + digest) for point in sweep.points)
    check_writable(table)
    if plans is not None:
        make_folder(plans)
    with Lock(table).take(), Table(table, fresh=not resume) as out:
        left = [point for point in points if point.key not in out.done]
        written: set[str] = set()
        with suppress(OutOfTimeError):
            for row in _answered(sweep, points, {point.key for point in left}, asked):
                new = row.key not in out.done and row.key not in written
                if out.add(row) and new:
                    written.add(row.key)
                    if progress is not None:
                        progress(len(written), len(left), row)
    return len(written), len(left) - len(written)


def _answered(
    sweep: Sweep, points: Sequence[Point], missing: set[str], asked: SweepContext
) -> Iterator[Row]:
    """The rows of all neighbours of what is missing, then those that their plans make better."""
    groups = [each for each in neighbours(points) if any(p.key in missing for p in each)]
    answers: dict[Point, Answer] = {}
    every = [point for group in groups for point in group]
    with _mapped(sweep, len(every)) as mapped:
        for point, answer in mapped(answered, [(point, asked) for point in every]):
            if answer is not None:
                answers[point] = answer
                yield answer.row
        known = [{p: answers[p] for p in group if p in answers} for group in groups]
        together = [(group, asked) for group in known if len(group) > 1]
        for rows in mapped(exchanged, together):
            yield from rows


_Mapped = Callable[[Callable[..., Any], Iterable[tuple[Any, ...]]], Iterator[Any]]


@contextmanager
def _mapped(sweep: Sweep, tasks: int) -> Iterator[_Mapped]:
    """What calls a function with many arguments, here or by the sweep's workers, and gives its
    answers as they come.
    """
    from joblib import Parallel, delayed

    workers = sweep.workers or os.cpu_count() or 1
    # On a cluster of workers their number is the cluster's.
    jobs = min(workers, tasks) if sweep.backend == "processes" else -1
    if jobs in (0, 1):
        yield lambda function, calls: (function(*each) for each in calls)
        return
    with _backend(sweep):
        parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
        yield lambda function, calls: parallel(delayed(function)(*each) for each in calls)


_MOST_NEIGHBOURS = 16
"""Questions whose plans are priced for each other: the square of it is a few seconds of pricing."""


def neighbours(points: Sequence[Point]) -> list[tuple[Point, ...]]:
    """The questions of one model, job, target, batch and length, in groups of some.

    Clusters are neighbours where islands of the same names have room for each other's plans.
    """
    alike: dict[Point, list[Point]] = {}
    for point in points:
        key = replace(point, cluster="", digest="", links=(), nodes=())
        alike.setdefault(key, []).append(point)
    return [
        tuple(group[at : at + _MOST_NEIGHBOURS])
        for group in alike.values()
        for at in range(0, len(group), _MOST_NEIGHBOURS)
    ]


@contextmanager
def _backend(sweep: Sweep) -> Iterator[None]:
    """Where joblib runs what it is given, as long as this lasts."""
    if sweep.backend == "processes":
        yield
        return
    from joblib import parallel_config

    with ExitStack() as stack:
        try:
            if sweep.backend == "dask":
                stack.enter_context(_dask(sweep.workers))
            else:
                from ray.util.joblib import register_ray

                register_ray()
        except ImportError as error:
            raise InputError(
                f"backend: {sweep.backend} is not installed ({error}); pip install "
                f"{'distributed' if sweep.backend == 'dask' else 'ray'}, or use backend: processes"
            ) from None
        stack.enter_context(parallel_config(backend=sweep.backend))
        yield


def _dask(workers: int | None) -> AbstractContextManager[Any]:
    """The caller's client; else that of the scheduler which DASK_SCHEDULER_ADDRESS names; else
    workers of this machine, one thread each.
    """
    import distributed

    client: Any = distributed.Client  # it has no types
    try:
        return nullcontext(distributed.get_client())
    except ValueError:
        pass
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    if address is None:
        count = workers or os.cpu_count() or 1
        own: AbstractContextManager[Any] = client(
            n_workers=count, threads_per_worker=1, dashboard_address=None
        )
        return own
    try:
        named: AbstractContextManager[Any] = client(address=address)
    except (OSError, ValueError) as error:
        raise InputError(
            f"DASK_SCHEDULER_ADDRESS is {address}: no scheduler answers there ({error})"
        ) from None
    return named


_WATCHING: list[int] = []
"""Parents whose end this process waits for."""

_WATCH_SECONDS = 1.0


def _end_with(parent: int) -> None:
    """End this worker soon after its parent, which a kill leaves no chance to say so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    if parent != os.getpid() and os.getppid() == parent and parent not in _WATCHING:
        _WATCHING.append(parent)
        threading.Thread(target=watch, daemon=True).start()


_STATUS: dict[type, str] = {InfeasibleError: "infeasible", LimitError: "limit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question's row, and what neighbours need of it; None where there is no such thing."""

    row: Row
    question: Question | None = None
    result: SearchResult | None = None


def answered(point: Point, asked: SweepContext) -> tuple[Point, Answer | None]:
    """The answer of one question by itself; None where the sweep is over before it is there."""
    if asked.parent is not None:
        _end_with(asked.parent)
    try:
        with ends_by(asked.end):
            check_time()
            answer = _answer(point, asked)
            check_time()  # what ended before its own limit is asked again
            return point, answer
    except OutOfTimeError:
        return point, None


def _answer(point: Point, asked: SweepContext) -> Answer:
    row, found = _row(point), None
    try:
        found = question(point)
        end = moment_in(found.job.time_limit_seconds)
        row = replace(
            row,
            target=found.job.target,
            global_batch_size=found.job.global_batch_size,
            sequence_length=found.job.sequence_length,
        )
        result = _best(found, (), asked)
        return Answer(row=_written(row, result, asked, end), question=found, result=result)
    except OutOfTimeError:
        raise
    except HetplanError as error:
        status = _STATUS.get(type(error), "error")
        return Answer(row=replace(row, status=status, reason=first_line(error)), question=found)


def exchanged(answers: dict[Point, Answer], asked: SweepContext) -> list[Row]:
    """The rows of neighbours that are better off once they have handed each other their plans.

    Then no row is slower than the plan of another one would be for it: what a faster link, more
    memory or more nodes allow at no higher price is never slower there.
    """
    points = [*answers]
    questions = {
        at: each.question for at, each in enumerate(answers.values()) if each.question is not None
    }
    own = {at: each.result for at, each in enumerate(answers.values()) if each.result is not None}
    results = dict(own)
    with suppress(OutOfTimeError), ends_by(asked.end):
        for _ in points:  # a plan wanders from neighbour to neighbour at most once around
            if not any([_bettered(at, questions, results, asked) for at in questions]):
                break
    return [
        _written(answers[points[at]].row, result, asked)
        for at, result in results.items()
        if result is not own.get(at)
    ]


def _written(row: Row, result: SearchResult, asked: SweepContext, end: float = math.inf) -> Row:
    """The row with the result, whose plan is written."""
    result = by_objective(result, asked.predictor, end=end)
    if is_interrupted(result):
        raise KeyboardInterrupt
    if asked.plans is not None:
        save_result(result, Path(asked.plans) / f"{row.key}.json")
    return _filled(row, result)


def _best(question: Question, known: Sequence[Plan], asked: SweepContext) -> SearchResult:
    found = best_plan(question, Answers(asked.predictor), known_plans=known)
    if is_interrupted(found):
        raise KeyboardInterrupt
    return found


def _bettered(
    at: int, questions: dict[int, Question], results: dict[int, SearchResult], asked: SweepContext
) -> bool:
    """Whether the plan of a neighbour is better for this question than its own; it is taken."""
    question, own = questions[at], results.get(at)
    evaluator = TableMaker.of(question, asked.predictor).evaluator
    least, best = math.inf if own is None else own.estimate.step_seconds, None
    for other, result in results.items():
        plan = None if other == at else carried(result, question)
        offer = None if plan is None else priced_start(plan, evaluator)
        if offer is not None and offer.seconds < least * (1.0 - RESOLUTION):
            least, best = offer.seconds, plan
    if best is None:
        return False
    try:
        results[at] = _best(question, [best], asked)
    except NO_ANSWER:
        return False
    return True


def _row(point: Point) -> Row:
    """Before there is an answer."""
    return Row(
        key=point.key,
        model=Path(point.model).name,
        cluster=Path(point.cluster).name,
        job=Path(point.job).name,
        target=point.target or "",
        global_batch_size=point.global_batch_size or 0,
        sequence_length=point.sequence_length or 0,
        links="; ".join(_link_words(point)),
        nodes="; ".join(f"{name} {count}" for name, count in point.nodes),
        status="error",
    )


def _link_words(point: Point) -> Iterator[str]:
    for change in point.links:
        words = f"{change.between[0]}-{change.between[1]}"
        if change.bandwidth_bytes_per_second is not None:
            words += f" {format_rate(8 * change.bandwidth_bytes_per_second, 'bit/s')}"
        if change.round_trip_seconds is not None:
            words += f" {format_seconds(change.round_trip_seconds)}"
        yield words


def _filled(row: Row, result: SearchResult) -> Row:
    certificate = result.certificate
    return replace(
        row,
        status="limit" if certificate is None else certificate.status,
        step_seconds=repr(result.estimate.step_seconds),
        tokens_per_second=repr(result.estimate.tokens_per_second),
        gap="" if certificate is None else repr(certificate.gap),
        lower_bound_seconds="" if certificate is None else repr(certificate.lower_bound_seconds),
        devices_in_use=str(devices_in_use(result.plan)),
        layout=layout_words(result.plan),
        reason="",
    )
