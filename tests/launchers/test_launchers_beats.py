"""What ranks say that they do is read whole; connections without an answer are found."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from hetplan.launchers.run_folder import RunFolder
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


def beat(operation: str, *peers: int) -> Beat:
    return Beat(
        seconds=0.0,
        done=0,
        kind=ActivityKind.COMMUNICATING,
        operation=operation,
        peers=peers,
        since_seconds=0.0,
    )


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
