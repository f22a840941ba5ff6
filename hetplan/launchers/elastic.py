"""How does a run go on when hosts fail, and when they come back?

A loop over phases: find the hosts that answer, plan for them, train from the last good checkpoint
until the run is finished, fails, or is left because hosts came back. What plans, trains and probes
is behind `World`; this file decides, and does nothing else.

It always ends: every phase either brings a new checkpoint or counts against the limit of restarts
without one, and where no plan fits the hosts that are left it says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol

from hetplan.errors import InputError, LaunchError
from hetplan.launchers.elastic_growth import NO_PLAN, GrowthWatch, PlanT, Progress
from hetplan.launchers.elastic_hosts import HostBook
from hetplan.launchers.elastic_values import (
    Ended,
    Ending,
    Grow,
    History,
    Phase,
    Rules,
    median_seconds,
    merged_steps,
)


class World(Protocol[PlanT]):
    """What an elastic run acts on."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that the run may use."""
        ...

    def reach(self, hosts: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
        """Those of `hosts` that answer now, and reach each other and all of `beside`."""
        ...

    def plan(self, hosts: Sequence[str], known: PlanT | None) -> PlanT:
        """A plan for these hosts, none slower than `known`, which uses some of them.

        InfeasibleError, LimitError or InputError where there is none.
        """
        ...

    def run(self, planned: PlanT, first_step: int, look: Callable[[Progress], bool]) -> Ending:
        """Train from the last checkpoint, which has `first_step` steps, until it ends.

        `look` is called about once a second, perhaps from another thread but never twice at a
        time; once it has said True the run saves a checkpoint at its next step boundary and ends.
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


class GaveUpError(LaunchError):
    """An elastic run ended before its last step."""


MAX_RETURNING_SECONDS = 300.0
"""How much longer than asked hosts are waited for that answer now and then: longer than a host that
stays needs for its probes, however often it was gone."""


class ElasticRun(Generic[PlanT]):
    """One run over as many phases as it takes."""

    def __init__(self, world: World[PlanT], rules: Rules, *, total_steps: int) -> None:
        self.world, self.rules, self.total_steps = world, rules, total_steps
        self.history = History()
        """Right at any moment, also when `train` raises."""
        self._book = HostBook(world.hosts, answers_needed=rules.answers_needed)
        # In a row without a new checkpoint.
        self._restarts = 0

    def train(self) -> History:
        """Train to the last step; GaveUpError where that cannot be.

        InputError where all steps are done already.
        """
        saved = self.world.checkpoint_steps()
        if saved >= self.total_steps:
            raise InputError(
                f"{saved} steps are done and the run is to have {self.total_steps} in all; ask for "
                "more (--steps counts from the first step of the training)"
            )
        while True:
            hosts, planned = self._next_plan()
            first = self.world.checkpoint_steps()
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

    def _phase(self, hosts: tuple[str, ...], planned: PlanT, first: int) -> tuple[Ending, Phase]:
        """Run one phase, and write it down."""
        number = len(self.history.phases) + 1
        self.world.tell(
            f"phase {number}: {', '.join(planned.used_hosts)} from step {first + 1}, predicted "
            f"{planned.step_seconds:.4g} s per step"
        )
        watch = GrowthWatch(
            self._book,
            planned,
            hosts,
            total_steps=self.total_steps,
            rules=self.rules,
            reach=self.world.reach,
            plan=lambda more: self.world.plan(more, planned),
            clock=self.world.clock,
            tell=self.world.tell,
        )
        began = self.world.clock()
        ending = self.world.run(planned, first, watch.look)
        checkpoint = self.world.checkpoint_steps()
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
            seconds=self.world.clock() - began,
        )
        self.history = replace(
            self.history,
            phases=(*self.history.phases, phase),
            steps=merged_steps(self.history.steps, ending.steps),
        )
        self.world.record(phase)
        return ending, phase

    def _next_plan(self) -> tuple[tuple[str, ...], PlanT]:
        """The hosts that are there, and a plan for them; waits for hosts as the rules say."""
        since = self.world.clock()
        while True:
            hosts = self._present()
            reason = "no host answers"
            if hosts:
                try:
                    return hosts, self.world.plan(hosts, None)
                except NO_PLAN as error:
                    reason = f"there is no plan for {', '.join(hosts)}: {error}"
            self._wait_for_hosts(since, reason)

    def _present(self) -> tuple[str, ...]:
        """Of the hosts that may be used those that answer; the others are left out."""
        usable = self._book.usable
        there = self.world.reach(usable, ())
        gone = tuple(name for name in usable if name not in there)
        if gone:
            self.world.tell(f"{', '.join(gone)}: no answer")
            self._book.leave_out(gone)
        return there

    def _wait_for_hosts(self, since: float, reason: str) -> None:
        """Return when a host has come back; GaveUpError where none does in time."""
        self.world.tell(f"{reason}; looking for hosts that come back")
        while True:
            asked = self._book.out
            back = self._book.heard(asked, self.world.reach(asked, ()))
            if back:
                self.world.tell(f"{', '.join(back)} came back")
                return
            late = self.world.clock() - since - self.rules.wait_seconds
            if late >= (MAX_RETURNING_SECONDS if self._book.returning else 0.0):
                raise GaveUpError(reason)
            self.world.wait(self.rules.answer_seconds)

    def _count_restart(self, phase: Phase) -> None:
        self._restarts += 1
        if self._restarts > self.rules.max_restarts:
            at = f"since step {phase.checkpoint_step}" if phase.checkpoint_step else "yet"
            raise GaveUpError(
                f"{self._restarts} phases in a row ended without a new checkpoint {at} "
                f"(--max-restarts {self.rules.max_restarts}); the last: {phase.reason}"
            )

    def _blame(self, ending: Ending) -> None:
        known = [name for name in ending.blamed if name in self.world.hosts]
        name = self._book.blame(known)
        if name:
            needed = self._book.needed(name)
            again = (
                "it is used again only after another fault"
                if self.rules.grow is Grow.NEVER
                else f"it is used again after {needed} probes that it answers"
            )
            self.world.tell(f"{name} is left out, two faults in a row were its own; {again}")
