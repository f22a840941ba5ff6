"""Passes that are as slow as their waits allow end no step later, by another replay."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hetplan.cost.energy.clocks import slack_of, slower_of
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.programs import Receive, Send, Wait, programs
from hetplan.cost.replay.times import PipelineTimes


def pipeline(draw: random.Random, schedule: str, wire: bool = False) -> PipelineTimes:
    stages, chunks = draw.choice((2, 3, 4)), 2 if schedule in ("interleaved-1f1b", "zbv") else 1
    microbatches = draw.choice((1, 2, 2 * stages, 8 * stages))
    hops = stages * chunks - 1
    messages = [np.array([draw.uniform(0.0, 0.4) for _ in range(hops)]) for _ in range(4)]
    wires = np.array([0 if wire and hop == 0 else -1 for hop in range(hops)], dtype=np.int64)
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=microbatches,
        warmup=tuple(min(stages - s, microbatches) for s in range(stages)),
        forward=np.array([[draw.uniform(0.5, 2.0)] * chunks for _ in range(stages)]),
        backward=np.array([[draw.uniform(1.0, 4.0)] * chunks for _ in range(stages)]),
        weight=np.array([[draw.uniform(0.5, 2.0)] * chunks for _ in range(stages)]),
        send_forward=messages[0],
        send_backward=messages[1],
        wire_latency=messages[2],
        rendezvous_extra=messages[3] / 10,
        link_forward=wires,
        link_backward=np.where(wires >= 0, 1, -1),
        shared_forward=messages[0],
        shared_backward=messages[1],
    )


def ends_with(times: PipelineTimes, seconds: list[list[float]], rendezvous: bool) -> list[float]:
    """When every stage ends if its passes take so long: in rounds, until no stage can go on."""
    written = programs(
        times.schedule, times.num_stages, times.num_microbatches, times.virtual_stages,
        times.warmup, rendezvous, times.exchange,
    )  # fmt: skip
    now, at = [0.0] * len(written), [0] * len(written)
    left_over = [list(each) for each in seconds]
    sent, room, left, queues = {}, {}, {}, {}
    for program in written:
        for step in program:
            if isinstance(step, Send):
                queues.setdefault(step.message[:2], []).append(step.message)
    while any(at[s] < len(program) for s, program in enumerate(written)):
        before = (*at, len(left))
        for s, program in enumerate(written):
            while at[s] < len(program):
                step = program[at[s]]
                if isinstance(step, Wait):
                    if not all(each in left for each in (*step.sent, *step.received)):
                        break
                    late = [left[each] + times.wire_latency[each[1]] for each in step.received]
                    now[s] = max([now[s], *late, *(left[each] for each in step.sent)])
                elif isinstance(step, Send):
                    sent[step.message] = now[s]
                elif isinstance(step, Receive):
                    room[step.message] = now[s]
                else:
                    now[s] += left_over[s].pop(0)
                at[s] += 1
        for (direction, hop), queue in queues.items():
            free = 0.0
            for message in queue:
                if message not in sent or (rendezvous and message not in room):
                    break
                begins = max(sent[message], free)
                if rendezvous:
                    begins = max(begins, room[message] + times.rendezvous_extra[hop])
                size = (times.send_forward, times.send_backward)[direction][hop]
                left[message] = free = begins + size
        assert (*at, len(left)) != before, "no stage can go on"
    return now


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zbv"])
def test_no_step_is_longer_where_passes_fill_the_waits_behind_them(schedule, rendezvous):
    draw, gained = random.Random(7), 0
    for _ in range(25):
        times = pipeline(draw, schedule)
        (found,) = slack_of([times], rendezvous=rendezvous)
        plain = ends_with(times, [list(each) for each, _ in found], rendezvous)
        (known,) = step_ends([times], rendezvous=rendezvous)
        assert plain == pytest.approx(known.tolist())
        slow = ends_with(times, [list(each + more) for each, more in found], rendezvous)
        assert slow == pytest.approx(plain)
        gained += sum(float(more.sum()) for _, more in found) > 0.0
    assert gained > 10


def test_more_than_the_slack_of_a_pass_moves_something():
    """It is not just small: one stage with a tenth more is late somewhere in most cases."""
    draw, late = random.Random(3), 0
    for _ in range(20):
        times = pipeline(draw, "1f1b")
        (found,) = slack_of([times], rendezvous=True)
        plain = ends_with(times, [list(each) for each, _ in found], True)
        slow = ends_with(times, [list(1.2 * (each + more)) for each, more in found], True)
        late += max(slow) > max(plain) * 1.1
    assert late == 20


def test_messages_on_a_shared_wire_stay_where_they_are():
    draw = random.Random(1)
    for _ in range(10):
        times = pipeline(draw, "1f1b", wire=True)
        if times.num_stages > 2:
            continue
        (found,) = slack_of([times], rendezvous=True)
        assert all(not more.any() for _, more in found)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "zbv"])
def test_clocks_of_a_long_step_are_on_the_line_through_two_shorter_ones(schedule):
    draw = random.Random(5)
    for _ in range(5):
        times = pipeline(draw, schedule)
        times = replace(times, num_microbatches=60 * times.num_stages)
        (whole,) = slower_of([times], rendezvous=True)
        (found,) = slower_of([times], rendezvous=True, most_passes=times.forward.size * 32)
        assert found == pytest.approx(whole, rel=0.02, abs=0.02 * whole[:, :1].max())


def test_clocks_of_a_step_of_a_million_microbatches_are_found_in_little_memory():
    times = replace(pipeline(random.Random(6), "1f1b"), num_microbatches=1_000_000)
    tracemalloc.start()
    try:
        (found,) = slower_of([times], rendezvous=True, most_passes=5_000)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found[:, 0] == pytest.approx(1e6 * (times.forward + times.backward)[:, 0])
    assert most < 50e6
