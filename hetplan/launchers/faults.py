"""The fault that ended a run: its kind, host, rank and operation, and the line that reports it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import LaunchError
from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.runtime.activity import Beat
from hetplan.units import format_seconds


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


def describe(
    kind: FaultKind,
    ranks: Sequence[WatchedRank],
    beats: Sequence[Beat | None],
    *,
    code: int | None,
    reason: str,
    seconds: float,
    silent: bool,
    cut: Sequence[tuple[str, str]] = (),
) -> str:
    """The fault of these ranks, the first of which ended with `code`, for this `reason`.

    `silent`: they were not heard of for so many seconds; otherwise nothing was finished for these.
    `cut`: pairs of hosts that do not answer each other.
    """
    first, did = ranks[0], _operation(beats[0])
    if kind is FaultKind.RANK_DIED:
        return f"{_ended(ranks, code)}{_hint(code)}; last seen in {did}"
    if kind is FaultKind.RANK_FAILED:
        return f"{_ended(ranks, code)} in {did}" + (f": {reason}" if reason else "")
    long = format_seconds(seconds)
    if kind is FaultKind.HOST_HANGS:
        who = ", ".join(f"rank {each.rank}" for each in ranks[:_MAX_SHOWN])
        return (
            f"host {first.host} hangs: nothing was heard of {who} for {long}; {_last(first, did)}"
        )
    if silent:
        return (
            f"{first} hangs: its process was not heard of for {long}, as if it were stopped; last "
            f"seen in {did}"
        )
    if kind is FaultKind.RANK_HANGS:
        return f"{first} hangs: {did} goes on, while no rank has finished anything for {long}"
    waits = "; ".join(
        f"{each}: {_operation(beat)}"
        for each, beat in list(zip(ranks, beats, strict=True))[:_MAX_SHOWN]
    )
    more = f"; and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    if kind is FaultKind.LINK_DOWN:
        return f"{_between(ranks, cut)} for {long}: {waits}{more}"
    return f"no rank has finished anything for {long}; these wait for each other: {waits}{more}"


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
    """The usual reason for a kill that nobody asked for."""
    if code == -signal.SIGKILL:
        return " (by somebody, or by the system for want of memory: see dmesg)"
    return ""


def _last(first: WatchedRank, did: str) -> str:
    return f"rank {first.rank} ({first.device_kind}, stage {first.stage}) was last seen in {did}"


def _operation(beat: Beat | None) -> str:
    if beat is None:
        return "the start of its process"
    return beat.operation or "nothing between two operations"


def _and(words: Sequence[str]) -> str:
    shown = list(words[:_MAX_SHOWN])
    if len(words) > _MAX_SHOWN:
        shown.append(f"{len(words) - _MAX_SHOWN} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
