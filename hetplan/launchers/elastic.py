"""Decide how a run continues when hosts fail, and when they come back.

`ElasticRun` loops over phases: find the hosts that answer, plan for them, train from the last good
checkpoint until the run is finished, fails, or is left because hosts came back. An
`ElasticBackend` plans, trains and probes; this file only decides. The run always ends: every phase
either brings a new checkpoint or counts against the limit of restarts without one, and where no
plan fits the hosts that are left it reports why.

`HostBook`: a host that was gone must answer several probes in a row before it is used again, twice
as many each time that it was gone: a host that comes and goes costs a run less and less. A host
that two faults in a row are blamed on is left out in the same way even while it answers, as long
as others are left.

`GrowthWatch`: a restart costs what the last one cost, from its start to its first finished step.
Each step that is left gains the part by which the larger cluster's plan is predicted to be faster:

    gain = steps left x measured step x (1 - predicted larger / predicted now)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from hetplan.errors import InfeasibleError, InputError, LaunchError, LimitError
from hetplan.runtime.measured import StepRecord
from hetplan.search.result import SearchResult

SCHEMA = "hetplan.elastic/1"


class Ended(StrEnum):
    """Why a phase ended."""

    FINISHED = "finished"
    """All steps of the run are done."""
    GREW = "grew"
    """Hosts came back: it saved a checkpoint at a step boundary and left."""
    FAULT = "fault"
    """A rank, a host or a link failed, and the launcher ended the others."""
    INTERRUPTED = "interrupted"


class Grow(StrEnum):
    """When a run leaves a phase for hosts that came back."""

    WORTH = "worth"
    """When the larger cluster's plan is predicted to be faster and the restart pays."""
    ALWAYS = "always"
    """Whenever the larger cluster's plan uses one of them."""
    NEVER = "never"
    """Only after a fault, when all is planned again anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an elastic run does about faults and about hosts that come back."""

    max_restarts: int = 3
    """Restarts in a row without a new checkpoint, after which it gives up."""
    grow: Grow = Grow.WORTH
    wait_seconds: float = 0.0
    """How long hosts are waited for where no plan fits those that are left."""
    answers_needed: int = 3
    """Probes in a row that a host which was gone answers before it is used again."""
    answer_seconds: float = 1.0
    """From one probe of a host that has answered to the next."""
    silence_seconds: float = 5.0
    """From one probe of a host that does not answer to the next."""
    least_gain: float = 0.02
    """Part of the predicted step by which a larger cluster must be faster to grow for it."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InputError(f"max-restarts is {self.max_restarts}; it must be at least 0")
        if not self.wait_seconds >= 0:
            raise InputError(f"wait-for-hosts is {self.wait_seconds} s; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one phase ended, as the world that ran it tells."""

    ended: Ended
    steps: tuple[StepRecord, ...]
    """Those that were finished, with the numbers that they have in the whole run."""
    start_seconds: float | None
    """From its start to the end of its first step; None where it finished none."""
    message: str = ""
    """Of a fault: what happened where."""
    blamed: tuple[str, ...] = ()
    """Of a fault: the hosts that it names; two where a link between them failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One plan on some hosts, from its start to its end."""

    hosts: tuple[str, ...]
    """Those that held a rank."""
    first_step: int
    """Steps that were done when it began: its first step has this number."""
    steps_done: int
    """Steps of the whole run that were done when it ended, those included that were lost."""
    checkpoint_step: int
    """Steps in the last good checkpoint when it had ended; 0: there is none."""
    ended: Ended
    reason: str
    """In words; of a phase that finished, what failed after its last checkpoint was saved, if
    anything did."""
    predicted_step_seconds: float
    median_step_seconds: float | None
    """None where it finished no step."""
    start_seconds: float | None
    """From its start to the end of its first step; None where it finished none."""
    seconds: float

    @property
    def lost_steps(self) -> int:
        """Steps that must be trained again, as no checkpoint has them."""
        return max(0, self.steps_done - self.checkpoint_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All phases of an elastic run, and the steps that the last of them to train each gave."""

    phases: tuple[Phase, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    """By their numbers; of a step that was trained again, the last time counts."""


def median_seconds(steps: tuple[StepRecord, ...]) -> float | None:
    """Of the steps but the first, which opens connections; of that one where there is no other."""
    counted = [step.seconds for step in steps[1:]] or [step.seconds for step in steps]
    return statistics.median(counted) if counted else None


def merged_steps(
    known: tuple[StepRecord, ...], more: tuple[StepRecord, ...]
) -> tuple[StepRecord, ...]:
    """Steps by number; where both have a step, that of `more`."""
    by_number = {step.step: step for step in (*known, *more)}
    return tuple(by_number[number] for number in sorted(by_number))


MAX_DOUBLINGS = 6
"""3 answers become at most 192: a host that was gone often is tried again after three minutes."""


@dataclass(slots=True)
class _Host:
    out: bool = False
    times_out: int = 0
    answers: int = 0
    """In a row, since it was left out."""


class HostBook:
    """What is known of every host of a run."""

    def __init__(self, hosts: Sequence[str], *, answers_needed: int) -> None:
        self._hosts = {name: _Host() for name in hosts}
        self._answers_needed = answers_needed
        self._blamed_last = ""

    @property
    def usable(self) -> tuple[str, ...]:
        """Hosts that were not left out, or have come back."""
        return tuple(name for name, host in self._hosts.items() if not host.out)

    @property
    def out(self) -> tuple[str, ...]:
        """Hosts that are left out."""
        return tuple(name for name, host in self._hosts.items() if host.out)

    @property
    def returning(self) -> tuple[str, ...]:
        """Hosts that are left out and answered the last probe."""
        return tuple(name for name, host in self._hosts.items() if host.out and host.answers)

    def needed(self, name: str) -> int:
        """Answers in a row that bring this host back."""
        doublings = min(max(0, self._hosts[name].times_out - 1), MAX_DOUBLINGS)
        return int(self._answers_needed * 2**doublings)

    def leave_out(self, names: Collection[str]) -> None:
        """These did not answer."""
        for name in names:
            host = self._hosts[name]
            host.out, host.answers = True, 0
            host.times_out += 1

    def blame(self, names: Sequence[str]) -> str:
        """A fault names these hosts; the one that is left out for it now, empty for none.

        One host that two faults in a row name is, unless no other may be used. Of a link between
        two hosts nobody knows whose fault it is.
        """
        name = names[0] if len(names) == 1 else ""
        again = bool(name) and name == self._blamed_last
        self._blamed_last = name
        if not again or self._hosts[name].out or self.usable == (name,):
            return ""
        self.leave_out((name,))
        self._blamed_last = ""
        return name

    def record_answers(self, probed: Collection[str], answered: Collection[str]) -> tuple[str, ...]:
        """Of hosts that were left out and probed these answered; those that may be used again."""
        back = []
        for name in probed:
            host = self._hosts[name]
            if not host.out:
                continue
            host.answers = host.answers + 1 if name in answered else 0
            if host.answers >= self.needed(name):
                host.out, host.answers = False, 0
                back.append(name)
        return tuple(back)


def mutually_reachable(
    hosts: Sequence[str], reaches: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """Hosts that all reach each other: the host that lacks most (of several the last in order) is
    left out until none lacks any.

    `reaches` has the others that each host reached; a host without an entry did not answer.
    """
    left = [name for name in hosts if name in reaches]
    while True:
        lacking = {
            one: sum(
                one != two and not (two in reaches[one] and one in reaches[two]) for two in left
            )
            for one in left
        }
        worst = max(reversed(left), key=lambda name: lacking[name], default="")
        if not worst or not lacking[worst]:
            return tuple(left)
        left.remove(worst)


NO_PLAN = (InfeasibleError, LimitError, InputError)
"""What planning for some hosts raises where there is no plan for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """A plan, and the hosts that it runs on."""

    used_hosts: tuple[str, ...]
    """Hosts that hold a rank."""
    step_seconds: float
    """Predicted."""
    result: SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the phase that is running has come."""

    steps_done: int
    """Of the whole run."""
    start_seconds: float | None
    """From the phase's start to the end of its first step; None before that."""
    step_seconds: float | None
    """Measured median; None before the first step."""


def growth_refusal(
    now: HostPlan, larger: HostPlan, progress: Progress, *, total_steps: int, rules: Rules
) -> str:
    """Why the run is not left for the larger cluster's plan; empty where it is.

    `progress` has a finished step.
    """
    if not set(larger.used_hosts) - set(now.used_hosts):
        return "the plan for all of them uses none of the hosts that came back"
    if rules.grow is Grow.ALWAYS:
        return ""
    gained = 1.0 - larger.step_seconds / now.step_seconds
    if gained <= rules.least_gain:
        return (
            f"predicted {larger.step_seconds:.4g} s per step with them, {now.step_seconds:.4g} s "
            f"without: not more than {rules.least_gain:.0%} faster"
        )
    steps_left = total_steps - progress.steps_done
    seconds = steps_left * (progress.step_seconds or now.step_seconds) * gained
    cost = progress.start_seconds or 0.0
    if seconds <= cost:
        return (
            f"the {steps_left} steps that are left would be {seconds:.3g} s shorter, and a restart "
            f"takes {cost:.3g} s"
        )
    return ""


class ElasticBackend(Protocol):
    """What an elastic run acts on."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that the run may use."""
        ...

    def reach(self, hosts: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
        """Those of `hosts` that answer now, and reach each other and all of `beside`."""
        ...

    def plan(self, hosts: Sequence[str], known: HostPlan | None) -> HostPlan:
        """A plan for these hosts, none slower than `known`, which uses some of them.

        InfeasibleError, LimitError or InputError where there is none.
        """
        ...

    def run(self, planned: HostPlan, first_step: int, look: Callable[[Progress], bool]) -> Ending:
        """Train from the last checkpoint, which has `first_step` steps, until it ends.

        `look` is called about once a second, perhaps from another thread but never twice at a
        time; once it has returned True the run saves a checkpoint at its next step boundary
        and ends.
        """
        ...

    def record(self, phase: Phase) -> None:
        """The phase that was run last is over, and this is what it was."""
        ...

    def checkpoint_steps(self) -> int:
        """Steps in the last good checkpoint; 0 where there is none."""
        ...

    def clock(self) -> float:
        """Seconds, never back."""
        ...

    def wait(self, seconds: float) -> None:
        """Until so many have passed."""
        ...

    def tell(self, text: str) -> None:
        """Say a line to the person who watches."""
        ...


class GrowthWatch:
    """Looks, while a phase runs, for hosts that come back, and tells when to leave it for them."""

    def __init__(
        self,
        book: HostBook,
        now: HostPlan,
        allowed: Sequence[str],
        backend: ElasticBackend,
        *,
        total_steps: int,
        rules: Rules,
    ) -> None:
        """`now` runs, planned for the hosts in `allowed`."""
        self._book, self._now, self._allowed = book, now, tuple(allowed)
        self._total_steps, self._rules = total_steps, rules
        self._backend = backend
        self._next = 0.0
        self._considered: set[tuple[str, ...]] = set()
        self.reason = ""
        """Why the phase shall be left; empty as long as it shall not."""

    def look(self, progress: Progress) -> bool:
        """Whether the phase shall be left at the next step boundary.

        To be called often; hosts are probed when it is time.
        """
        if self.reason:
            return True
        self._probe()
        new = tuple(name for name in self._book.usable if name not in self._allowed)
        if not new or new in self._considered or progress.start_seconds is None:
            return False
        if self._rules.grow is Grow.NEVER:
            self._considered.add(new)
            self._backend.tell(f"{', '.join(new)} came back and will be used after the next fault")
            return False
        # One of them may be gone again by now; and so may a host that the plan had
        # no use for, as no fault tells.
        idle = tuple(name for name in self._allowed if name not in self._now.used_hosts)
        there = self._backend.reach((*new, *idle), self._now.used_hosts)
        gone = tuple(name for name in (*new, *idle) if name not in there)
        self._book.leave_out(gone)
        self._allowed = tuple(name for name in self._allowed if name not in gone)
        if not set(new) & set(gone):
            self._consider(new, progress)
        return bool(self.reason)

    def _probe(self) -> None:
        """Ask hosts that are left out, when it is time to."""
        probed = self._book.out
        if not probed or self._backend.clock() < self._next:
            return
        answered = self._backend.reach(probed, self._now.used_hosts)
        back = self._book.record_answers(probed, answered)
        if back:
            self._backend.tell(
                f"{', '.join(back)} answered {self._rules.answers_needed} or more probes"
            )
        soon = bool(self._book.returning)
        self._next = self._backend.clock() + (
            self._rules.answer_seconds if soon else self._rules.silence_seconds
        )

    def _consider(self, new: tuple[str, ...], progress: Progress) -> None:
        self._considered.add(new)
        back = ", ".join(new)
        try:
            larger = self._backend.plan((*self._allowed, *new), self._now)
        except NO_PLAN as error:
            self._backend.tell(f"{back} came back, and there is no plan with them: {error}")
            return
        why = growth_refusal(
            self._now, larger, progress, total_steps=self._total_steps, rules=self._rules
        )
        if why:
            self._backend.tell(f"{back} came back and will be used after the next fault: {why}")
            return
        self.reason = (
            f"{back} came back: predicted {larger.step_seconds:.4g} s per step instead of "
            f"{self._now.step_seconds:.4g} s"
        )
        self._backend.tell(f"{self.reason}; the run is left after its next step")


class GaveUpError(LaunchError):
    """An elastic run ended before its last step."""


MAX_RETURNING_SECONDS = 300.0
"""Added to the wait for hosts that answer now and then: longer than a host that stays needs for its
probes, however often it was gone."""


class ElasticRun:
    """One run over as many phases as it takes."""

    def __init__(self, backend: ElasticBackend, rules: Rules, *, total_steps: int) -> None:
        self.backend, self.rules, self.total_steps = backend, rules, total_steps
        self.history = History()
        """Right at any moment, also when `train` raises."""
        self._book = HostBook(backend.hosts, answers_needed=rules.answers_needed)
        # In a row without a new checkpoint.
        self._restarts = 0

    def train(self) -> History:
        """Train to the last step; GaveUpError where that cannot be.

        InputError where all steps are done already.
        """
        saved = self.backend.checkpoint_steps()
        if saved >= self.total_steps:
            raise InputError(
                f"{saved} steps are done and the run is to have {self.total_steps} in all; ask for "
                "more (--steps counts from the first step of the training)"
            )
        while True:
            hosts, planned = self._next_plan()
            first = self.backend.checkpoint_steps()
            ending, phase = self._phase(hosts, planned, first)
            if ending.ended is Ended.INTERRUPTED:
                raise KeyboardInterrupt
            if phase.ended is Ended.FINISHED:
                return self.history
            new = phase.checkpoint_step > saved
            saved = max(saved, phase.checkpoint_step)
            self._restarts = 0 if new else self._restarts
            if ending.ended is Ended.FAULT or not new:
                self._count_restart(phase)
            if ending.ended is Ended.FAULT:
                self._blame(ending)

    def _phase(self, hosts: tuple[str, ...], planned: HostPlan, first: int) -> tuple[Ending, Phase]:
        """Run one phase, and write it down."""
        number = len(self.history.phases) + 1
        self.backend.tell(
            f"phase {number}: {', '.join(planned.used_hosts)} from step {first + 1}, predicted "
            f"{planned.step_seconds:.4g} s per step"
        )
        watch = GrowthWatch(
            self._book,
            planned,
            hosts,
            self.backend,
            total_steps=self.total_steps,
            rules=self.rules,
        )
        began = self.backend.clock()
        ending = self.backend.run(planned, first, watch.look)
        checkpoint = self.backend.checkpoint_steps()
        # A rank that fails after the last checkpoint was saved has nothing left to do.
        done = checkpoint >= self.total_steps and ending.ended is not Ended.INTERRUPTED
        phase = Phase(
            hosts=planned.used_hosts,
            first_step=first,
            steps_done=ending.steps[-1].step + 1 if ending.steps else first,
            checkpoint_step=checkpoint,
            ended=Ended.FINISHED if done else ending.ended,
            reason=watch.reason if ending.ended is Ended.GREW else ending.message,
            predicted_step_seconds=planned.step_seconds,
            median_step_seconds=median_seconds(ending.steps),
            start_seconds=ending.start_seconds,
            seconds=self.backend.clock() - began,
        )
        self.history = replace(
            self.history,
            phases=(*self.history.phases, phase),
            steps=merged_steps(self.history.steps, ending.steps),
        )
        self.backend.record(phase)
        return ending, phase

    def _next_plan(self) -> tuple[tuple[str, ...], HostPlan]:
        """The hosts that are there, and a plan for them; waits for hosts as the rules say."""
        since = self.backend.clock()
        while True:
            hosts = self._present()
            reason = "no host answers"
            if hosts:
                try:
                    return hosts, self.backend.plan(hosts, None)
                except NO_PLAN as error:
                    reason = f"there is no plan for {', '.join(hosts)}: {error}"
            self._wait_for_hosts(since, reason)

    def _present(self) -> tuple[str, ...]:
        """Of the hosts that may be used those that answer; the others are left out."""
        usable = self._book.usable
        there = self.backend.reach(usable, ())
        gone = tuple(name for name in usable if name not in there)
        if gone:
            self.backend.tell(f"{', '.join(gone)}: no answer")
            self._book.leave_out(gone)
        return there

    def _wait_for_hosts(self, since: float, reason: str) -> None:
        """Return when a host has come back; GaveUpError where none does in time."""
        self.backend.tell(f"{reason}; looking for hosts that come back")
        while True:
            probed = self._book.out
            back = self._book.record_answers(probed, self.backend.reach(probed, ()))
            if back:
                self.backend.tell(f"{', '.join(back)} came back")
                return
            late = self.backend.clock() - since - self.rules.wait_seconds
            if late >= (MAX_RETURNING_SECONDS if self._book.returning else 0.0):
                raise GaveUpError(reason)
            self.backend.wait(self.rules.answer_seconds)

    def _count_restart(self, phase: Phase) -> None:
        self._restarts += 1
        if self._restarts > self.rules.max_restarts:
            at = f"since step {phase.checkpoint_step}" if phase.checkpoint_step else "yet"
            raise GaveUpError(
                f"{self._restarts} phases in a row ended without a new checkpoint {at} "
                f"(--max-restarts {self.rules.max_restarts}); the last: {phase.reason}"
            )

    def _blame(self, ending: Ending) -> None:
        known = [name for name in ending.blamed if name in self.backend.hosts]
        name = self._book.blame(known)
        if name:
            needed = self._book.needed(name)
            again = (
                "it is used again only after another fault"
                if self.rules.grow is Grow.NEVER
                else f"it is used again after {needed} probes that it answers"
            )
            self.backend.tell(f"{name} is left out, two faults in a row were its own; {again}")
