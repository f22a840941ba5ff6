"""Is it worth leaving a run for hosts that came back, and when?

A restart costs what the last one cost, from its start to its first finished step. Each step that is
left gains the part by which the larger cluster's plan is predicted to be faster:

    gain = steps left x measured step x (1 - predicted larger / predicted now)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.launchers.elastic_hosts import HostBook
from hetplan.launchers.elastic_values import Grow, Rules

NO_PLAN = (InfeasibleError, LimitError, InputError)
"""What planning for some hosts raises where there is no plan for them."""


class Planned(Protocol):
    """A plan for some hosts."""

    @property
    def used_hosts(self) -> tuple[str, ...]:
        """Hosts that hold a rank."""
        ...

    @property
    def step_seconds(self) -> float:
        """Predicted."""
        ...


PlanT = TypeVar("PlanT", bound=Planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the phase that is running has come."""

    steps_done: int
    """Of the whole run."""
    start_seconds: float | None
    """From the phase's start to the end of its first step; None before that."""
    step_seconds: float | None
    """Measured median; None before the first step."""


def refusal(
    now: Planned, larger: Planned, progress: Progress, *, total_steps: int, rules: Rules
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


class GrowthWatch:
    """Looks, while a phase runs, for hosts that come back, and says when to leave it for them.

    `reach(hosts, beside)` gives those of `hosts` that reach each other and all of `beside`;
    `plan(hosts)` a plan for these hosts. Both may take seconds, and raise.
    """

    def __init__(
        self,
        book: HostBook,
        now: Planned,
        allowed: Sequence[str],
        *,
        total_steps: int,
        rules: Rules,
        reach: Callable[[Sequence[str], Sequence[str]], tuple[str, ...]],
        plan: Callable[[tuple[str, ...]], Planned],
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        """`now` runs, planned for the hosts in `allowed`."""
        self._book, self._now, self._allowed = book, now, tuple(allowed)
        self._total_steps, self._rules = total_steps, rules
        self._reach, self._plan, self._clock, self._tell = reach, plan, clock, tell
        self._next = 0.0
        self._judged: set[tuple[str, ...]] = set()
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
        if not new or new in self._judged or progress.start_seconds is None:
            return False
        if self._rules.grow is Grow.NEVER:
            self._judged.add(new)
            self._tell(f"{', '.join(new)} came back and will be used after the next fault")
            return False
        # Since they were found, one of them may be gone again; and so may a host that the plan had
        # no use for, as no fault tells.
        idle = tuple(name for name in self._allowed if name not in self._now.used_hosts)
        there = self._reach((*new, *idle), self._now.used_hosts)
        gone = tuple(name for name in (*new, *idle) if name not in there)
        self._book.leave_out(gone)
        self._allowed = tuple(name for name in self._allowed if name not in gone)
        if not set(new) & set(gone):
            self._judge(new, progress)
        return bool(self.reason)

    def _probe(self) -> None:
        """Ask hosts that are left out, when it is time to."""
        asked = self._book.out
        if not asked or self._clock() < self._next:
            return
        answered = self._reach(asked, self._now.used_hosts)
        back = self._book.heard(asked, answered)
        if back:
            self._tell(f"{', '.join(back)} answered {self._rules.answers_needed} or more probes")
        soon = bool(self._book.returning)
        self._next = self._clock() + (
            self._rules.answer_seconds if soon else self._rules.silence_seconds
        )

    def _judge(self, new: tuple[str, ...], progress: Progress) -> None:
        self._judged.add(new)
        back = ", ".join(new)
        try:
            larger = self._plan((*self._allowed, *new))
        except NO_PLAN as error:
            self._tell(f"{back} came back, and there is no plan with them: {error}")
            return
        why = refusal(self._now, larger, progress, total_steps=self._total_steps, rules=self._rules)
        if why:
            self._tell(f"{back} came back and will be used after the next fault: {why}")
            return
        self.reason = (
            f"{back} came back: predicted {larger.step_seconds:.4g} s per step instead of "
            f"{self._now.step_seconds:.4g} s"
        )
        self._tell(f"{self.reason}; the run is left after its next step")
