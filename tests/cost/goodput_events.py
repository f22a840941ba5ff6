"""A run event by event: saves, failures, restarts and backup paths, without any formula."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Path:
    """Parts with a backup path."""

    failures_per_second: float
    step_factor: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the run meets; seconds."""

    failures_per_second: float
    work: float
    """Between two saves."""
    save: float
    delay: float
    recovery: float
    paths: Sequence[Path] = ()
    freeze: float = 0.0
    repair: float = 0.0


@dataclass
class Events:
    """The run as it goes: what is done, what is saved, and what is due when."""

    rules: Rules
    rng: random.Random
    now: float = 0.0
    done: float = 0.0
    """Work, that to be done again left out."""
    saved: float = 0.0
    """Work that a failure does not take."""
    down_until: float = 0.0
    frozen_until: float = 0.0
    saving_until: float | None = None
    writing: list[tuple[float, float]] = field(default_factory=list)
    """(when it counts, work) of saves that do not count yet."""
    broken: list[tuple[float, float]] = field(default_factory=list)
    """(when it is repaired, factor of the step)."""
    down: float = 0.0
    """Seconds in recovery."""

    def run(self, seconds: float) -> float:
        """Work that is done and saved when so much time has gone by."""
        rules = self.rules
        fails = self._next(rules.failures_per_second)
        breaks = [self._next(path.failures_per_second) for path in rules.paths]
        next_save = rules.work
        while self.now < seconds:
            slow = max((factor for _, factor in self.broken), default=1.0)
            idle = max(self.down_until, self.frozen_until)
            pending = self.writing[0][0] if self.writing else math.inf
            mended = self.broken[0][0] if self.broken else math.inf
            if self.saving_until is not None:
                due = self.saving_until
            elif idle > self.now:
                due = idle
            else:
                due = self.now + (next_save - self.done) * slow
            event = min(due, fails, pending, mended, *breaks)
            if self.saving_until is None and idle <= self.now:
                self.done += (event - self.now) / slow
            if self.down_until > self.now:
                self.down += min(event, self.down_until) - self.now
            self.now = event
            if event == fails:
                self.done, self.writing, self.saving_until = self.saved, [], None
                next_save = self.saved + rules.work
                self.down_until = event + rules.recovery
                fails = self._next(rules.failures_per_second)
            elif event == pending:
                self.saved = self.writing.pop(0)[1]
            elif event == mended:
                heapq.heappop(self.broken)
            elif event in breaks:
                at = breaks.index(event)
                self.frozen_until = event + rules.freeze
                factor = rules.paths[at].step_factor
                heapq.heappush(self.broken, (event + rules.freeze + rules.repair, factor))
                breaks[at] = self._next(rules.paths[at].failures_per_second)
            elif self.saving_until is not None:
                self.saving_until = None
                self.writing.append((event + rules.delay, self.done))
                next_save = self.done + rules.work
            elif idle < event:
                self.saving_until = event + rules.save
                self.done = next_save
        return self.saved

    def _next(self, rate: float) -> float:
        return math.inf if rate == 0.0 else self.now + self.rng.expovariate(rate)
