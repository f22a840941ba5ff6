"""What a search has found so far, written while it runs: lines of JSON, one per event.

    first line   schema, version, digests of the inputs
    offer        a plan better than all before it, whole
    bound        a bound of one solver was raised
    step         one solver has done one thing (improve, prove); the counts since the beginning
    resumed      a search went on from here; events of the step that was broken off count no more
    end          how the search ended

Every line is flushed. A file that was cut off at any byte is read up to its last whole line. A
search that resumes with the same inputs takes whole steps from the record and computes the rest,
so it ends where it would have ended. Plans and bounds of a step that was broken off are kept in
reserve for a search that reaches its time limit. Wall times stand only here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.encoding import to_plain
from hetplan.files.reading import Document, decode, read_bytes
from hetplan.job.spec import Job
from hetplan.kernels import clock
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.descriptions import describe_solver
from hetplan.search.solver import Best, Grounds, Offer, Solver
from hetplan.version import __version__

SCHEMA = "hetplan.journal/2"
JOURNAL_EXISTS = "exists already; continue it with --resume, or name another file"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First line."""

    schema: str
    hetplan_version: str
    inputs: tuple[tuple[str, str], ...]
    """(name, sha256) of what was asked, without gap and time limit."""
    gap: float


@dataclass(frozen=True, slots=True)
class JournalFile:
    """Where a search writes its journal."""

    path: Path
    resume: bool = False
    """Go on from what the file has; otherwise there must be none."""

    def apart(self) -> JournalFile:
        """A journal beside this one, which goes on from its own file, or else from this one's: of a
        search whose plan may be none of the question (`hetplan.whatif.within_limits`).
        """
        beside = self.path.with_name(f"{self.path.name}.first")
        if self.resume and self.path.is_file() and not beside.is_file():
            shutil.copyfile(self.path, beside)
        return JournalFile(beside, self.resume)

    @property
    def is_there(self) -> bool:
        """Whether there is something to go on from."""
        return self.path.is_file() or JournalFile(self.path).apart().path.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Any other line."""

    event: str
    elapsed_seconds: float = 0.0
    solver: int = -1
    what: str = ""
    """`improve` or `prove` of a step; what a bound rests on; how the search ended."""
    family: str = ""
    """The solver in words."""
    seconds: float | None = None
    """Of an offer; of a bound, None: no plan of this solver is feasible; of a step the target below
    which its programs ended, if they did (`Best.stalled_at`)."""
    chosen: ChosenPlan | None = None
    replays: int = 0
    listed: int = 0
    explored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A whole step from the record."""

    what: str
    solver: int
    events: tuple[Event, ...]
    done: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRecord:
    """An offer that a journal has."""

    line: int
    seconds: float
    chosen: ChosenPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a journal says."""

    header: Header
    steps: tuple[Step, ...]
    reserve: tuple[Event, ...]
    """Offers and bounds of steps that were broken off."""
    offers: tuple[OnRecord, ...]
    whole_bytes: int
    """Length of the whole lines."""


def digests(
    model: ModelSpec, cluster: Cluster, job: Job, sha256: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """What a resumed search must have been asked: model, cluster, job, and the predictor's file."""
    asked = replace(job, gap=0.0, time_limit_seconds=None)
    found = [
        (name, hashlib.sha256(_line(to_plain(value))).hexdigest())
        for name, value in (("model", model), ("cluster", cluster), ("job", asked))
    ]
    found += [(name, digest) for name, digest in sha256 if name == "predictor"]
    return tuple(found)


def _line(data: object) -> bytes:
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def read_journal(path: Path) -> Record | None:
    """What the journal says; None where there is no file or not one whole line.

    InputError where a whole line is not one of a journal, or says what no search writes.
    """
    if not os.path.lexists(path):
        return None
    data = read_bytes(path)
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if not lines:
        return None
    header = _decoded(path, 1, lines[0], Header)
    if header.schema != SCHEMA:
        message = f"found {header.schema}, of an older hetplan; start again without --resume"
        raise InputError(Fault(file=str(path), line=1, field="schema", message=message))
    steps: list[Step] = []
    reserve: list[Event] = []
    pending: list[Event] = []
    offers: list[OnRecord] = []
    for number, line in enumerate(lines[1:], start=2):
        event = _decoded(path, number, line, Event)
        _check_seconds(path, number, event)
        if event.event == "offer" and event.seconds is not None and event.chosen is not None:
            offers.append(OnRecord(line=number, seconds=event.seconds, chosen=event.chosen))
        if event.event in ("offer", "bound"):
            pending.append(event)
        elif event.event == "step":
            step = Step(what=event.what, solver=event.solver, events=tuple(pending), done=event)
            steps.append(step)
            pending = []
        else:
            reserve += pending
            pending = []
    return Record(
        header=header,
        steps=tuple(steps),
        reserve=(*reserve, *pending),
        offers=tuple(offers),
        whole_bytes=len(whole),
    )


def _decoded(path: Path, number: int, line: bytes, type_: type[T]) -> T:
    try:
        text = line.decode("utf-8")
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            Fault(
                file=str(path),
                line=number,
                message="is no line of a journal; name a file that `hetplan plan --journal` wrote",
            )
        ) from error
    if isinstance(root, dict) and type_ is not Header:
        root.setdefault("schema", SCHEMA)
    document = Document(file=str(path), text=text, root=root, sha256="")
    try:
        return decode(document, type_, schema=SCHEMA)
    except InputError as error:
        raise InputError(*(replace(fault, line=number) for fault in error.faults)) from error


def _check_seconds(path: Path, number: int, event: Event) -> None:
    """InputError where the seconds of a line can be neither a plan's nor a bound's."""
    seconds = event.seconds
    if event.event == "offer" and (seconds is None or event.chosen is None):
        raise _altered(path, number, "", "an offer has `seconds` and `chosen`, this one has not")
    # A bound or a target may be 0; no plan takes no time.
    least = 0.0 if event.event != "offer" else math.ulp(0.0)
    if seconds is not None and not least <= seconds < math.inf:
        raise _altered(path, number, "seconds", f"is {seconds}, which no search writes")


def _altered(path: Path, number: int, field_: str, found: str) -> InputError:
    message = f"{found}; the line was changed: start again without --resume"
    return InputError(Fault(file=str(path), line=number, field=field_, message=message))


@dataclass(slots=True)
class Journal:
    """Takes events of a search: writes them, and gives back steps that are on record."""

    path: Path | None
    started: float
    best: Best
    solvers: Sequence[Solver] = ()
    steps: Sequence[Step] = ()
    reserve: Sequence[Event] = ()
    record: Record | None = None
    """What was there before."""
    from_start: bool = False
    """The record is of another gap: its plans and bounds are known from the start, no steps."""
    closed: bool = False
    _taken: int = 0
    _silent: bool = False
    _file: IO[bytes] | None = field(default=None, repr=False)

    def begin(self, header: Header, whole_bytes: int, *, resume: bool) -> None:
        """Open the file: a new one, or behind the whole lines of the one to resume."""
        if self.path is None:
            return
        try:
            if whole_bytes:
                self._file = self.path.open("r+b")
                self._file.truncate(whole_bytes)
                self._file.seek(whole_bytes)
            else:
                self._file = self.path.open("wb" if resume else "xb")
        except FileExistsError as error:  # made since the command looked
            raise InputError(Fault(file=str(self.path), message=JOURNAL_EXISTS)) from error
        except OSError as error:
            message = f"the journal cannot be written: {error.strerror}"
            raise InputError(Fault(file=str(self.path), message=message)) from error
        if whole_bytes:
            self.write(Event(event="resumed"))
        else:
            self._put(to_plain(header))

    def write(self, event: Event) -> None:
        """One more line."""
        if self._file is None:
            return
        elapsed = clock() - self.started
        plain = to_plain(replace(event, elapsed_seconds=round(elapsed, 3)))
        if isinstance(plain, dict):
            kept = ("event", "elapsed_seconds")
            # Fields that say nothing stay out; a bound without seconds says that nothing fits.
            plain = {
                key: value
                for key, value in plain.items()
                if key in kept or (value not in (None, "", 0, -1))
            }
            if event.event in ("offer", "bound", "step"):
                plain["solver"] = event.solver
        self._put(plain)

    def _put(self, plain: object) -> None:
        if self._file is not None:
            self._file.write(_line(plain))
            self._file.flush()

    def close(self, status: str) -> None:
        """Say how the search ended."""
        self.write(Event(event="end", what=status))
        if self._file is not None:
            self._file.close()
            self._file = None
        self.closed = True

    def on_event(self, event: Offer | tuple[int, float]) -> None:
        """Listener of `Best`."""
        if self._silent or self._file is None:
            return
        if isinstance(event, Offer):
            offered = Event(
                event="offer", solver=event.solver, seconds=event.seconds, chosen=event.chosen
            )
            self.write(replace(offered, family=self._name(event.solver)))
        else:
            solver, bound = event
            seconds = bound if math.isfinite(bound) else None
            grounds = self.best.grounds.get(solver, Grounds.JOURNAL)
            event_of_bound = Event(event="bound", solver=solver, seconds=seconds, what=grounds)
            self.write(replace(event_of_bound, family=self._name(solver)))

    def _name(self, solver: int) -> str:
        return describe_solver(self.solvers[solver]) if 0 <= solver < len(self.solvers) else ""

    def on_record(self, what: str, solver: int) -> bool:
        """Take the next step from the record if it is this one; whether it was."""
        if self._taken >= len(self.steps):
            return False
        step = self.steps[self._taken]
        if (step.what, step.solver) != (what, solver):
            # Other decisions than on record: from here on the record is only a reserve.
            self.reserve = (*self.reserve, *_events(self.steps[self._taken :]))
            self.steps = self.steps[: self._taken]
            return False
        self._taken += 1
        self._silent = True
        try:
            apply_events(step.events, self.best)
        finally:
            self._silent = False
        best, done = self.best, step.done
        best.replays, best.listed, best.explored = done.replays, done.listed, done.explored
        if done.seconds is not None:
            best.stalled_at[solver] = done.seconds
        return True

    def done(self, what: str, solver: int) -> None:
        """A step was computed."""
        if self._file is None:
            return
        best = self.best
        self.write(
            Event(
                event="step",
                what=what,
                solver=solver,
                family=self._name(solver),
                seconds=best.stalled_at.get(solver),
                replays=best.replays,
                listed=best.listed,
                explored=best.explored,
            )
        )

    def wrong(self, offer: Offer, found: str) -> InputError | None:
        """What to say of a wrong offer that is on record; None where it is not from there."""
        offers = () if self.record is None else self.record.offers
        for each in offers:
            if self.path is not None and (each.seconds, each.chosen) == (
                offer.seconds,
                offer.chosen,
            ):
                message = f"is not what the plan takes: {found}"
                return _altered(self.path, each.line, "seconds", message)
        return None

    def use_reserve(self) -> None:
        """Plans and bounds of steps that were broken off, for a search that ends early."""
        left = _events(self.steps[self._taken :])
        apply_events((*self.reserve, *left), self.best)


def _events(steps: Sequence[Step]) -> Iterator[Event]:
    for step in steps:
        yield from step.events


def apply_events(events: Sequence[Event], best: Best) -> None:
    """Tell `best` what is on record."""
    for event in events:
        if not -1 <= event.solver < len(best.bounds):
            continue
        if event.event == "offer" and event.chosen is not None and event.seconds is not None:
            best.offer(event.solver, event.chosen, event.seconds)
        elif event.event == "bound" and event.solver >= 0:
            bound = math.inf if event.seconds is None else event.seconds
            known = event.what in tuple(Grounds)
            grounds = Grounds(event.what) if known else Grounds.JOURNAL
            best.raise_bound(event.solver, bound, grounds)


def resumable(record: Record, header: Header, path: Path) -> bool:
    """Whether the steps on record are this search's own; False: only its plans and bounds are.

    InputError where the journal is of other inputs.
    """
    if record.header.hetplan_version != header.hetplan_version:
        raise InputError(
            Fault(
                file=str(path),
                line=1,
                field="hetplan_version",
                message=f"was written by hetplan {record.header.hetplan_version}, this is "
                f"{header.hetplan_version}; start again without --resume",
            )
        )
    before, now = dict(record.header.inputs), dict(header.inputs)
    other = [name for name in now if before.get(name) != now[name]]
    if other:
        raise InputError(
            Fault(
                file=str(path),
                line=1,
                field="inputs",
                message=f"is of another {' and another '.join(other)}; resume with the files that "
                "the search began with, or start again without --resume",
            )
        )
    return record.header.gap == header.gap


def header_of(inputs: tuple[tuple[str, str], ...], gap: float) -> Header:
    """First line of a new journal."""
    return Header(schema=SCHEMA, hetplan_version=__version__, inputs=inputs, gap=gap)
