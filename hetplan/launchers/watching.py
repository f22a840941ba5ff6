"""Watch a run: is something wrong with it, and what was wrong first?

Judged from three things: how processes ended, whether their beats go on, and what the beats
report (`hetplan.runtime.activity`). Pure: time and what was seen are arguments.

- A process that ended badly is a fault at once. What a signal ended comes before what failed,
  because those that lose a peer fail too; of those that failed, the first. A rank that only ran out
  of patience with another is not the cause: the other is looked at.
- A process without a beat is stopped, or its host hangs.
- Where all beat and none finishes an operation for too long, hosts that do not answer each other
  are the cause, or else the rank that the others wait for. Who waits for whom is a graph: a rank
  that computes waits for nobody; where every rank waits, the cause is a set of ranks that wait for
  each other and for nobody else (a strongly connected component without a way out).

Time in which the launcher itself stood still counts against nobody.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import LaunchError
from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.launchers.run_folder import Failure
from hetplan.runtime.activity import ActivityKind, Beat
from hetplan.units import format_seconds

SETTLE_SECONDS = 0.5
"""When one rank dies others fail too, as their connections break: time for all to say so."""
SILENT_SECONDS = 6.0
"""24 beats; ranks that share a busy core were late by less than one second."""
QUIET_SECONDS = 1.5
"""Long enough without a beat to suspect a rank."""
SILENT_START_SECONDS = 30.0
"""While libraries are loaded: the interpreter lets no other thread run meanwhile."""
STALL_SECONDS = 10.0
STALL_FACTOR = 5.0
"""An operation may take so many times the longest one that was predicted, or was seen so far."""
CONNECT_SECONDS = 30.0
_MAX_LOOK_SECONDS = 0.5
_TIMED_OUT = re.compile(r"[Tt]imed? ?out")
_MIN_WAIT_SECONDS = 3.0


class FaultKind(StrEnum):
    """What is wrong, as far as it can be told from outside."""

    RANK_DIED = "rank-died"
    """A signal ended the process."""
    RANK_FAILED = "rank-failed"
    """The process ended by itself, with an error."""
    RANK_HANGS = "rank-hangs"
    """The process is silent, or computes without an end."""
    HOST_HANGS = "host-hangs"
    """All ranks of the host are silent."""
    LINK_DOWN = "link-down"
    """Ranks on several hosts are alive, wait for each other, and nothing arrives."""
    NO_PROGRESS = "no-progress"
    """Nothing goes on, and none of the above can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFault:
    """The first thing that went wrong in a run."""

    kind: FaultKind
    host: str
    """Of the first of `ranks`."""
    hosts: tuple[str, ...]
    """All hosts that it may be due to: of a link both ends."""
    ranks: tuple[int, ...]
    """Those that died, failed, hang or wait for each other."""
    operation: str
    """What the first of them did when it was last heard of."""
    peers: tuple[int, ...]
    """Ranks that it did this with."""
    seconds: float
    """From the fault to when it was noticed, as far as it is known."""
    message: str
    """In one line, for a person."""


class RunFailed(LaunchError):  # noqa: N818
    """A run was ended because of a fault; its other processes are gone."""

    def __init__(self, fault: RunFault, text: str = "") -> None:
        self.fault = fault
        super().__init__(text or fault.message)


_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """Who a rank is."""

    rank: int
    host: str
    device_kind: str
    stage: int
    """Counted through the stages of all pipelines."""

    def __str__(self) -> str:
        where = "" if self.host == THIS_MACHINE else f" on {self.host}"
        return f"rank {self.rank}{where} ({self.device_kind}, stage {self.stage})"


def _between(ranks: Sequence[WatchedRank], cut: Sequence[tuple[str, str]]) -> str:
    if not cut:
        hosts = list(dict.fromkeys(rank.host for rank in ranks))
        return f"nothing passes between {_and(hosts)}"
    common = [host for host in cut[0] if all(host in pair for pair in cut)]
    if len(cut) > 1 and common:
        others = [host for pair in cut for host in pair if host != common[0]]
        return f"{common[0]} answers nothing to {_and(others)}, nor they to it"
    pairs = [f"{one} and {other}" for one, other in cut]
    return f"nothing passes between {', '.join(pairs[:_MAX_SHOWN])}"


def _ended(ranks: Sequence[WatchedRank], code: int | None) -> str:
    first = ranks[0]
    also = f" (and {_and([f'rank {other.rank}' for other in ranks[1:]])})" if len(ranks) > 1 else ""
    if code is None or code >= 0:
        how = f"ended with code {code}"
    else:
        how = f"was ended by {signal.Signals(-code).name}"
    where = "" if first.host == THIS_MACHINE else f" on {first.host}"
    return f"rank {first.rank} {how}{where} ({first.device_kind}, stage {first.stage}){also}"


def _hint(code: int | None) -> str:
    """The usual reason for a SIGKILL."""
    if code == -signal.SIGKILL:
        return " (by somebody, or by the system for want of memory: see dmesg)"
    return ""


def _operation(beat: Beat | None) -> str:
    if beat is None:
        return "the start of its process"
    return beat.operation or "nothing between two operations"


def _and(words: Sequence[str]) -> str:
    shown = list(words[:_MAX_SHOWN])
    if len(words) > _MAX_SHOWN:
        shown.append(f"{len(words) - _MAX_SHOWN} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


# ---- who waits for whom

WAITING = (ActivityKind.COMMUNICATING, ActivityKind.CONNECTING)


def root_of_standstill(beats: Mapping[int, Beat], waiting: int | None = None) -> tuple[int, ...]:
    """The ranks that a standstill of these ranks, which are alive, comes from; there is at least
    one, and the one that has been in its operation longest comes first.

    One rank that waits for nobody, or ranks that wait for each other or for ranks that are gone. Of
    several roots the one that began to stand first. `waiting`: only what this rank waits for.
    """
    if waiting is not None:
        beats = {rank: beats[rank] for rank in _reached(waiting, beats)}

    def since(rank: int) -> tuple[float, int]:
        return beats[rank].since_seconds, rank

    computing = [rank for rank, beat in beats.items() if beat.kind not in WAITING]
    if computing:
        return (min(computing, key=since),)
    reached = {rank: _reached(rank, beats) for rank in beats}
    # Without a way out: all that it reaches reaches it.
    closed = [
        rank for rank in beats if all(rank in reached[other] for other in reached[rank] - {rank})
    ]
    return tuple(sorted(reached[min(closed, key=since)], key=since))


def _reached(rank: int, beats: Mapping[int, Beat]) -> frozenset[int]:
    """Whom the rank waits for, they wait for, and so on; itself included."""
    reached, left = {rank}, [rank]
    while left:
        for peer in beats[left.pop()].peers:
            if peer in beats and peer not in reached:
                reached.add(peer)
                left.append(peer)
    return frozenset(reached)


# ---- watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long nothing may happen."""

    stall_seconds: float
    """Without a finished operation of any rank, while they compute and talk."""
    exact: bool
    """Set by the user: longer operations that were seen do not make it longer."""
    start_seconds: float
    """The same while a rank starts or ends."""
    files_seconds: float
    """The same while a rank reads or writes a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """State of one rank's process."""

    code: int | None
    """Its process's exit code, negative for a signal; None: it runs."""
    beat: Beat | None
    failure: Failure | None


class Watcher:
    """Watches one run; `look` as often as something may have changed."""

    def __init__(
        self,
        ranks: Sequence[WatchedRank],
        patience: Patience,
        now: float,
        *,
        host_of_address: Callable[[str], str],
    ) -> None:
        """From `now` on; `host_of_address` is that of the ranks' `Hosts`."""
        self._ranks, self._patience, self._looked = ranks, patience, now
        self._host_of_address = host_of_address
        self._beaten: list[float | None] = [None] * len(ranks)
        self._silent = [0.0] * len(ranks)
        self._ended_at: dict[int, float] = {}
        self._done, self._stood, self._longest = -1, 0.0, 0.0
        self._in_steps = False

    def look(self, now: float, seen: Sequence[Seen]) -> RunFault | None:
        """The fault that ended the run, once it is certain; None while there is none.

        `now` is on any clock that does not go back.
        """
        passed = min(now - self._looked, _MAX_LOOK_SECONDS)
        self._looked = now
        self._count(passed, seen)
        return (
            self._signalled(now, seen)
            or self._silence(seen)
            or self._failed(now, seen)
            or (self._standstill(seen))
        )

    def _count(self, passed: float, seen: Sequence[Seen]) -> None:
        for rank, rank_seen in enumerate(seen):
            beaten = rank_seen.beat.seconds if rank_seen.beat is not None else None
            self._silent[rank] = (
                0.0 if beaten != self._beaten[rank] else self._silent[rank] + passed
            )
            self._beaten[rank] = beaten
            if rank_seen.code:
                self._ended_at.setdefault(rank, self._looked)
        done = sum(rank_seen.beat.done for rank_seen in seen if rank_seen.beat is not None)
        if done == self._done:
            self._stood += passed
        else:
            # How long it took is known only now that it is over.
            if self._in_steps:
                self._longest = max(self._longest, self._stood)
            self._done, self._stood, self._in_steps = done, 0.0, True
        self._in_steps &= all(
            rank_seen.beat is not None
            and rank_seen.beat.kind in (ActivityKind.COMPUTING, ActivityKind.COMMUNICATING)
            for rank_seen in seen
        )

    def _settled(self, now: float) -> bool:
        return bool(self._ended_at) and now - min(self._ended_at.values()) >= SETTLE_SECONDS

    def _signalled(self, now: float, seen: Sequence[Seen]) -> RunFault | None:
        """Processes that a signal ended; the launcher has not sent any yet."""
        ended = [rank for rank, each in enumerate(seen) if each.code is not None and each.code < 0]
        if not ended or not self._settled(now):
            return None
        # A library that loses its peer may abort by itself.
        first = min(
            ended, key=lambda rank: (seen[rank].code == -signal.SIGABRT, self._ended_at[rank])
        )
        host = self._ranks[first].host
        return self._fault(
            FaultKind.RANK_DIED,
            (first, *(r for r in ended if r != first and self._ranks[r].host == host)),
            seen,
            now - self._ended_at[first],
            hosts=(host, *(self._ranks[rank].host for rank in ended)),
        )

    def _silence(self, seen: Sequence[Seen]) -> RunFault | None:
        alive = [rank for rank, each in enumerate(seen) if each.code is None]
        silent = [rank for rank in alive if self._silent[rank] >= self._silent_limit(seen[rank])]
        if not silent:
            return None
        # Those of one host are not heard of at quite the same time.
        silent += [
            rank
            for rank in alive
            if rank not in silent and self._silent[rank] >= self._silent_limit(seen[rank]) - 1.0
        ]
        first = max(silent, key=lambda rank: self._silent[rank])
        host = self._ranks[first].host
        mine = [rank for rank in alive if self._ranks[rank].host == host]
        whole = host != THIS_MACHINE and all(rank in silent for rank in mine)
        return self._fault(
            FaultKind.HOST_HANGS if whole else FaultKind.RANK_HANGS,
            (first, *(rank for rank in silent if rank != first and rank in mine)),
            seen,
            self._silent[first],
            hosts=(host, *(self._ranks[rank].host for rank in silent)),
            silent=True,
        )

    def _silent_limit(self, seen: Seen) -> float:
        if seen.beat is None:
            return self._patience.start_seconds
        loads = seen.beat.kind in (ActivityKind.LOADING, ActivityKind.ENDING)
        return SILENT_START_SECONDS if loads else SILENT_SECONDS

    def _failed(self, now: float, seen: Sequence[Seen]) -> RunFault | None:
        bad = [rank for rank, each in enumerate(seen) if each.code]
        if not bad or not self._settled(now):
            return None

        def failed_at(rank: int) -> float:
            failure = seen[rank].failure
            return failure.seconds if failure is not None else float("inf")

        first = min(bad, key=failed_at)
        beat, failure = seen[first].beat, seen[first].failure
        if beat is not None and beat.kind in WAITING:
            alive = [rank for rank, each in enumerate(seen) if each.code is None]
            if any(self._silent[rank] >= QUIET_SECONDS for rank in alive):
                return None  # one of these may be what it waited for: known in a few seconds
            waited = failure.seconds - beat.since_seconds if failure is not None else 0.0
            if waited >= _MIN_WAIT_SECONDS and failure and _TIMED_OUT.search(failure.reason):
                return self._root(seen, waited, waiting=first)
        return self._fault(FaultKind.RANK_FAILED, (first,), seen, now - self._ended_at[first])

    def _standstill(self, seen: Sequence[Seen]) -> RunFault | None:
        limit = max(
            (self._limit(rank.beat) for rank in seen if rank.code is None), default=float("inf")
        )
        # A rank that has failed explains why others stand: it is settled soon.
        if self._stood < limit or self._ended_at:
            return None
        return self._root(seen, self._stood)

    def _limit(self, beat: Beat | None) -> float:
        patience = self._patience
        if beat is None or beat.kind in (
            ActivityKind.LOADING,
            ActivityKind.STARTING,
            ActivityKind.ENDING,
        ):
            return patience.start_seconds
        if beat.kind is ActivityKind.SAVING:
            return patience.files_seconds
        if beat.kind is ActivityKind.CONNECTING:
            return max(CONNECT_SECONDS, patience.stall_seconds)
        if patience.exact:
            return patience.stall_seconds
        return max(patience.stall_seconds, STALL_FACTOR * self._longest)

    def _root(self, seen: Sequence[Seen], stood: float, *, waiting: int | None = None) -> RunFault:
        beats = {
            rank: each.beat
            for rank, each in enumerate(seen)
            if each.beat is not None and each.code != 0
        }
        root = root_of_standstill(beats, waiting)
        cut = self._cut(beats)
        hosts = _ends(cut) if cut else tuple(dict.fromkeys(map(self._host, root)))
        if cut:
            ranks = tuple(rank for rank in root if self._host(rank) in hosts)
            senders = tuple(rank for rank, beat in beats.items() if beat.unanswered)
            return self._fault(
                FaultKind.LINK_DOWN, ranks or senders, seen, stood, hosts=hosts, cut=cut
            )
        kind = FaultKind.NO_PROGRESS
        if beats[root[0]].kind not in WAITING:
            kind = FaultKind.RANK_HANGS
        elif len(hosts) > 1:
            kind = FaultKind.LINK_DOWN
        return self._fault(kind, root, seen, stood, hosts=hosts)

    def _host(self, rank: int) -> str:
        return self._ranks[rank].host

    def _cut(self, beats: Mapping[int, Beat]) -> tuple[tuple[str, str], ...]:
        """Pairs of hosts of which one acknowledges nothing that the other sends."""
        pairs: dict[frozenset[str], tuple[str, str]] = {}
        for rank, beat in beats.items():
            for address in beat.unanswered:
                pair = self._host(rank), self._host_of_address(address)
                if pair[1] and pair[0] != pair[1]:
                    pairs.setdefault(frozenset(pair), pair)
        return tuple(pairs.values())

    def _fault(
        self,
        kind: FaultKind,
        ranks: tuple[int, ...],
        seen: Sequence[Seen],
        seconds: float,
        *,
        hosts: Sequence[str] = (),
        silent: bool = False,
        cut: Sequence[tuple[str, str]] = (),
    ) -> RunFault:
        first = seen[ranks[0]]
        blamed = tuple(dict.fromkeys(hosts or map(self._host, ranks)))
        return RunFault(
            kind=kind,
            host=blamed[0],
            hosts=blamed,
            ranks=ranks,
            operation=first.beat.operation if first.beat is not None else "start of the process",
            peers=first.beat.peers if first.beat is not None else (),
            seconds=seconds,
            message=self._message(kind, ranks, seen, format_seconds(seconds), silent, cut),
        )

    def _message(
        self,
        kind: FaultKind,
        ranks: tuple[int, ...],
        seen: Sequence[Seen],
        long: str,
        silent: bool,
        cut: Sequence[tuple[str, str]],
    ) -> str:
        who = [self._ranks[rank] for rank in ranks]
        first, did = who[0], _operation(seen[ranks[0]].beat)
        code, failure = seen[ranks[0]].code, seen[ranks[0]].failure
        if kind is FaultKind.RANK_DIED:
            return f"{_ended(who, code)}{_hint(code)}; last seen in {did}"
        if kind is FaultKind.RANK_FAILED:
            reason = f": {failure.reason}" if failure is not None and failure.reason else ""
            return f"{_ended(who, code)} in {did}{reason}"
        if kind is FaultKind.HOST_HANGS:
            names = ", ".join(f"rank {rank}" for rank in ranks[:_MAX_SHOWN])
            return (
                f"host {first.host} hangs: nothing was heard of {names} for {long}; rank "
                f"{first.rank} ({first.device_kind}, stage {first.stage}) was last seen in {did}"
            )
        if silent:
            return (
                f"{first} hangs: its process was not heard of for {long}, as if it were stopped; "
                f"last seen in {did}"
            )
        if kind is FaultKind.RANK_HANGS:
            return f"{first} hangs: {did} goes on, while no rank has finished anything for {long}"
        waits = "; ".join(
            f"{self._ranks[rank]}: {_operation(seen[rank].beat)}" for rank in ranks[:_MAX_SHOWN]
        )
        waits += f"; and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
        if kind is FaultKind.LINK_DOWN:
            return f"{_between(who, cut)} for {long}: {waits}"
        return f"no rank has finished anything for {long}; these wait for each other: {waits}"


def _ends(cut: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """All hosts of these pairs, the one that is in most of them first."""
    ends = [host for pair in cut for host in pair]
    return tuple(sorted(dict.fromkeys(ends), key=lambda host: -ends.count(host)))
