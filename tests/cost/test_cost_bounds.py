"""The lower bounds against the replays that they bound: one-sided, and close."""

from __future__ import annotations

import numpy as np
from replay_cases import random_plain

from hetplan.cost.bounds import (
    busy_seconds,
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.cost.replay.times import replay_seconds


def test_no_part_of_a_bound_is_above_a_replay_and_each_is_close_somewhere() -> None:
    """Parts of 1F1B with eager sends, as `hetplan.cost.bounds` has them."""
    rng = np.random.default_rng(12)
    ratios, slack = [], dict.fromkeys(("busy", "once", "circuit", "trip", "interval"), np.inf)
    for index in range(1500):
        case, _ = random_plain(
            rng, transfers=(0.0, 0.1, 2.0)[index % 3], deeper=index % 2 == 1, most_stages=5
        )
        m, last = case.num_microbatches, len(case.forward) - 1
        step = replay_seconds(case, np.zeros(last + 1), False)
        down = np.append(case.send_forward + case.wire_latency, 0.0)
        up = np.append(case.send_backward + case.wire_latency, 0.0)
        own = case.forward + case.backward
        sigma = own.sum() + down.sum() + up.sum()
        limit = (step - sigma) * (1 + 1e-9) + 1e-9
        best = 0.0
        for s in range(last + 1):
            f, b, w = case.forward[s], case.backward[s], min(int(case.warmup[s]), m)
            busy = busy_seconds(own[:s].sum(), own[s], m)
            once = sigma + wait_once_seconds(f, b, m, w)
            assert max(busy, once) <= step * (1 + 1e-9)
            slack["busy"] = min(slack["busy"], step - busy)
            slack["once"] = min(slack["once"], step - once)
            best = max(best, busy, once)
            # Room that a step of this length leaves downstream is room that is there.
            downstream = own[s + 1 :].sum() + down[s:].sum() + up[s + 1 :].sum()
            room = downstream_room_seconds(limit, f, b, b + up[s], m, w)
            assert room >= downstream
            slack["trip"] = min(slack["trip"], room - downstream)
            if s == last:
                continue
            circuit = f + b + down[s] + up[s] + own[s + 1]
            turning = min(int(case.warmup[s + 1]), m)
            interval = sigma + interval_seconds(circuit, f, b, m, w, turning)
            assert interval <= step * (1 + 1e-9)
            room = interval_room_seconds(limit, circuit, f, b, b + up[s], m, w, turning)
            assert room >= downstream
            slack["circuit"] = min(slack["circuit"], step - interval)
            slack["interval"] = min(slack["interval"], room - downstream)
            best = max(best, interval)
        ratios.append(step / best)
    # A bound that had lost a part would be far off.
    assert np.mean(ratios) < 1.1
    assert max(slack.values()) < 1e-6, slack
