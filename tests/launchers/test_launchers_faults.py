"""What was wrong first with a run, judged from exits, beats and operations; no process is started.
What ranks say that they do is read whole; connections without an answer are found.

The standstill of random graphs is judged beside a plain oracle: ranks that wait for nobody but
each other, found by trying.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.launchers.run_folder import Failure, RunFolder
from hetplan.launchers.watching import (
    SETTLE_SECONDS,
    SILENT_SECONDS,
    STALL_SECONDS,
    FaultKind,
    Patience,
    RunFault,
    Seen,
    WatchedRank,
    Watcher,
    root_of_standstill,
)
from hetplan.runtime.activity import (
    RECORD_BYTES,
    Activity,
    ActivityKind,
    Beat,
    Heartbeat,
    read_beat,
    record_of,
    unanswered,
)

HOSTS = ("north1", "north2", "south1", "south2")
ADDRESSES = {f"10.0.0.{at + 1}": host for at, host in enumerate(HOSTS)}
START = 120.0


def beat(
    operation: str = "forward pass of microbatch 1",
    *peers: int,
    since: float = 0.0,
    kind: ActivityKind | None = None,
    unanswered: tuple[str, ...] = (),
) -> Beat:
    return Beat(
        seconds=0.0,
        done=0,
        kind=kind or (ActivityKind.COMMUNICATING if peers else ActivityKind.COMPUTING),
        operation=operation,
        peers=peers,
        since_seconds=since,
        unanswered=unanswered,
    )


class Script:
    """A run of four ranks in a pipeline, seen every tenth of a second."""

    def __init__(self, *, hosts: tuple[str, ...] = HOSTS, exact: bool = False) -> None:
        self.now = 1000.0
        self.beats: list[Beat | None] = [beat() for _ in hosts]
        self.codes: list[int | None] = [None] * len(hosts)
        self.failures: list[Failure | None] = [None] * len(hosts)
        self.silent: set[int] = set()
        self.watcher = Watcher(
            [
                WatchedRank(rank=rank, host=host, device_kind="fast", stage=rank)
                for rank, host in enumerate(hosts)
            ],
            Patience(
                stall_seconds=STALL_SECONDS, exact=exact, start_seconds=START, files_seconds=300.0
            ),
            self.now,
            host_of_address=lambda address: ADDRESSES.get(address, ""),
        )

    def run(
        self, seconds: float, *, working: bool = False, look: float = 0.1
    ) -> tuple[RunFault | None, float]:
        """The fault and how long it took; None and `seconds` where there was none."""
        began = self.now
        while self.now - began < seconds:
            self.now += look
            for rank, old in enumerate(self.beats):
                if old is None or rank in self.silent or self.codes[rank] is not None:
                    continue
                done = old.done + 1 if working else old.done
                self.beats[rank] = replace(old, seconds=self.now, done=done)
            fault = self.watcher.look(
                self.now,
                [
                    Seen(code=code, beat=each, failure=failure)
                    for code, each, failure in zip(
                        self.codes, self.beats, self.failures, strict=True
                    )
                ],
            )
            if fault is not None:
                return fault, self.now - began
        return None, seconds

    def fails(self, rank: int, reason: str, at: float | None = None) -> None:
        self.codes[rank] = 1
        self.failures[rank] = Failure(seconds=self.now if at is None else at, reason=reason)


def found(script: Script, within: float) -> RunFault:
    fault, seconds = script.run(within + 1.0)
    assert fault is not None
    assert seconds <= within + 0.2
    return fault


def test_a_run_that_works_has_no_fault() -> None:
    script = Script()
    assert script.run(200.0, working=True) == (None, 200.0)


def test_a_killed_process_comes_before_those_that_fail_for_it() -> None:
    script = Script()
    script.run(5.0, working=True)
    script.fails(1, "Connection reset by peer")
    script.run(0.1)
    script.codes[2] = -signal.SIGKILL
    fault = found(script, SETTLE_SECONDS)
    assert (fault.kind, fault.host, fault.ranks) == (FaultKind.RANK_DIED, "south1", (2,))
    assert "rank 2 was ended by SIGKILL on south1 (fast, stage 2)" in fault.message
    assert "forward pass of microbatch 1" in fault.message


@pytest.mark.parametrize(
    ("hosts", "silent", "kind", "ranks"),
    [
        (("a", "a", "b", "b"), {1}, FaultKind.RANK_HANGS, (1,)),
        (("a", "a", "b", "b"), {2, 3}, FaultKind.HOST_HANGS, (2, 3)),
        ((THIS_MACHINE,) * 4, {0, 1, 2, 3}, FaultKind.RANK_HANGS, (0, 1, 2, 3)),
    ],
)
def test_a_host_hangs_where_all_its_ranks_are_silent(
    hosts: tuple[str, ...], silent: set[int], kind: FaultKind, ranks: tuple[int, ...]
) -> None:
    script = Script(hosts=hosts)
    script.run(5.0, working=True)
    script.silent = silent
    fault = found(script, SILENT_SECONDS)
    assert (fault.kind, fault.ranks) == (kind, ranks)


def test_a_launcher_that_stood_still_blames_nobody() -> None:
    script = Script()
    script.run(5.0, working=True)
    # It looks again after a minute, before the ranks have had a chance to beat.
    script.silent = {0, 1, 2, 3}
    assert script.run(0.1, look=60.0)[0] is None
    script.silent = set()
    assert script.run(50.0, working=True)[0] is None


def test_a_rank_that_computes_for_ever_is_named_and_not_those_that_wait() -> None:
    script = Script()
    script.run(5.0, working=True)
    script.beats = [
        beat("receive of the gradients of microbatch 0", 1, since=3.0),
        beat("receive of the gradients of microbatch 0", 2, since=2.0),
        beat("backward pass of microbatch 0", since=4.0),
        beat("barrier before step 2", 0, 1, 2, since=1.0),
    ]
    fault = found(script, STALL_SECONDS)
    assert (fault.kind, fault.host, fault.ranks) == (FaultKind.RANK_HANGS, "south1", (2,))
    assert fault.operation == "backward pass of microbatch 0"


def test_two_that_wait_for_each_other_are_a_link_that_is_down() -> None:
    script = Script()
    script.beats = [
        beat("receive of the gradients of microbatch 0", 1, since=1.0),
        beat("send of the activations of microbatch 1", 2, since=3.0),
        beat("receive of the activations of microbatch 1", 1, since=2.0),
        beat("receive of the activations of microbatch 1", 2, since=2.5),
    ]
    fault = found(script, STALL_SECONDS)
    assert (fault.kind, fault.ranks) == (FaultKind.LINK_DOWN, (2, 1))
    assert fault.hosts == ("south1", "north2")
    assert "nothing passes between south1 and north2" in fault.message
    assert "to rank" not in fault.message


def test_hosts_that_do_not_answer_are_named_where_all_wait_for_all() -> None:
    """A barrier says nothing of who is cut off; the connections do."""
    script = Script()
    everyone = [
        beat("barrier before step 7", *(other for other in range(4) if other != rank))
        for rank in range(4)
    ]
    south1 = ("10.0.0.3",)
    script.beats = [
        replace(everyone[0], unanswered=south1),
        everyone[1],
        replace(everyone[2], unanswered=("10.0.0.4",)),
        replace(everyone[3], unanswered=(*south1, "192.168.7.7")),
    ]
    fault = found(script, STALL_SECONDS)
    assert (fault.kind, fault.host) == (FaultKind.LINK_DOWN, "south1")
    assert set(fault.hosts) == {"south1", "south2", "north1"}
    assert fault.hosts[0] == "south1"
    assert "south1 answers nothing to north1 and south2" in fault.message


@pytest.mark.parametrize(
    ("kind", "least"),
    [(ActivityKind.SAVING, 300.0), (ActivityKind.STARTING, START), (ActivityKind.LOADING, START)],
)
def test_what_takes_long_by_nature_is_waited_for(kind: ActivityKind, least: float) -> None:
    script = Script()
    everyone = tuple(range(1, 4))
    script.beats = [
        beat("save of a checkpoint", kind=kind),
        *(beat("exchange", 0, *(o for o in everyone if o != rank)) for rank in everyone),
    ]
    assert script.run(least - 1.0)[0] is None
    assert found(script, 1.0).ranks == (0,)


def test_a_rank_that_lost_patience_with_one_that_computes_is_not_the_cause() -> None:
    script = Script()
    script.run(5.0, working=True)
    script.beats[1] = beat("receive of the gradients of microbatch 0", 2, since=script.now)
    script.beats[2] = beat("backward pass of microbatch 0", since=script.now)
    script.run(5.0)
    script.fails(1, "Timed out waiting 5000ms for recv operation to complete")
    fault = found(script, SETTLE_SECONDS)
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_HANGS, (2,))


WAITS = st.integers(2, 6).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True),
        min_size=count,
        max_size=count,
    )
)


@given(WAITS, st.randoms(use_true_random=False))
def test_the_root_of_a_standstill_waits_for_nobody_else(
    waits: list[list[int]], random: Random
) -> None:
    beats = {
        rank: beat("receive", *(each for each in peers if each != rank), since=random.random())
        for rank, peers in enumerate(waits)
    }
    beats = {
        rank: each if each.peers else replace(each, kind=ActivityKind.COMMUNICATING)
        for rank, each in beats.items()
    }
    root = root_of_standstill(beats)
    mine = set(root)
    assert all(set(beats[rank].peers) <= mine for rank in mine)
    for start in mine:  # and nothing less than all of them does
        reached = {start}
        while more := {peer for rank in reached for peer in beats[rank].peers} - reached:
            reached |= more
        assert reached == mine


# ---- what ranks say that they do


def test_beats_are_written_while_the_thread_that_trains_is_busy(tmp_path: Path) -> None:
    activity, path = Activity(), RunFolder(tmp_path).activity(0)
    heartbeat = Heartbeat(activity, path)
    first = read_beat(path)
    assert first is not None
    assert first.kind is ActivityKind.LOADING
    activity.begin("send of the activations of microbatch 3", (1, 2))
    limit = time.monotonic() + 10.0
    while (seen := read_beat(path)) is None or seen.operation != activity.beat().operation:
        assert time.monotonic() < limit
    assert (seen.kind, seen.peers, seen.done) == (ActivityKind.COMMUNICATING, (1, 2), 1)
    with activity.within("sum over its tensor-parallel ranks", (7,)):
        assert activity.beat().operation.endswith("3: sum over its tensor-parallel ranks")
        assert activity.beat().peers == (7,)
    assert (activity.beat().peers, activity.beat().done) == ((1, 2), 3)
    activity.end()
    heartbeat.stop()
    last = read_beat(path)
    assert last is not None
    assert (last.operation, last.done) == ("", 4)
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_half_a_beat_is_no_beat(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.activity"
    assert read_beat(path) is None
    whole = record_of(beat("x" * 10_000, *range(1000)))
    assert len(whole) == RECORD_BYTES
    path.write_bytes(whole)
    found = read_beat(path)
    assert found is not None
    assert len(found.operation) == 200
    other = record_of(beat("forward pass of microbatch 2", 1, 2))
    for cut in (0, 1, 20, 100, 1000):
        path.write_bytes(other[:cut] + whole[cut:])
        assert read_beat(path) in (None, found)
    path.write_bytes(whole[:100])
    assert read_beat(path) is None


def test_connections_without_an_answer_are_found(tmp_path: Path) -> None:
    # Lines as Linux 6.18 prints them, addresses in the order of bytes of an x86 or Arm machine.
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  ...\n"
        "   0: 0100060A:8AE2 0300060A:C001 01 00000400:00000000 01:00000100 00000005     0 0 1\n"
        "   1: 0100060A:8AE2 0200060A:C001 01 00000000:00000000 00:00000000 00000000     0 0 1\n"
        "   2: 0100060A:8AE2 0400060A:C001 02 00000001:00000000 01:00000100 00000002     0 0 1\n"
        "   3: 0100060A:8AE2 0500060A:C001 01 00000001:00000000 01:00000100 00000001     0 0 1\n"
        "   4: 0100060A:8AE2 0600060A:C001 06 00000001:00000000 01:00000100 00000009     0 0 1\n"
    )
    assert unanswered(table) == ("10.6.0.3", "10.6.0.4")
    assert unanswered(tmp_path / "none") == ()
