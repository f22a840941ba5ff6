"""The cheapest path against all paths, and the inequalities of a bottleneck against replays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from random_cases import seeds

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.search.multi_pipeline.paths import Stages, cheapest_path, weigh_turns
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE


def _role(at: int, count: int) -> int:
    if count == 1:
        return BOTH
    return LAST if at == 0 else FIRST if at == count - 1 else MIDDLE


@pytest.mark.parametrize("seed", seeds(40))
def test_the_cheapest_path_is_the_cheapest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_options, num_layers, rows = 3, int(rng.integers(2, 6)), 4
    phases = int(rng.integers(1, 3))
    fewest = int(rng.integers(1, 3))
    down, bonus = (2.0, 1.0) if rng.random() < 0.5 else (1.0, 0.4)
    layer, price = rng.uniform(0.2, 1.0, num_options), rng.uniform(0.1, 2.0, num_options)
    serial = rng.uniform(0.0, 0.3, (4, num_options))
    wire = serial + rng.uniform(0.0, 0.2, (4, num_options))
    most_layers = np.sort(rng.integers(0, 5, (4, num_options, rows + 4)))[..., ::-1].copy()
    allowed = rng.random((phases, num_options)) < 0.8
    most = float(rng.uniform(0.8, 2.5))
    least = most * 0.95
    shortest = least if rng.random() < 0.5 else 0.0

    values = np.empty((phases, 8, rows + 1, num_layers + 1))
    chosen = np.empty(values.shape, np.int64)
    stages = Stages(layer, wire, serial, most_layers, price, allowed)
    weigh_turns(values, chosen, stages, least, shortest, most, down, bonus)
    path = np.empty((2, rows), np.int64)
    found = cheapest_path(values, chosen, fewest, path)

    def weight(options: tuple[int, ...], layers: tuple[int, ...], turn: int) -> float:
        """Infinite where the path is not allowed; `turn`: position of the bottleneck."""
        count, total = len(options), 0.0
        switches = [
            all(allowed[min(p, phases - 1) if at >= cut else 0, o] for at, o in enumerate(options))
            for cut in range(count + 1)
            for p in (1,)
        ]
        if not any(switches):
            return np.inf
        for at, (o, n) in enumerate(zip(options, layers, strict=True)):
            role, below = _role(at, count), at < turn
            turn_seconds = n * layer[o] + serial[role, o]
            if n > most_layers[role, o, at + 1] or turn_seconds > most:
                return np.inf
            if at == turn and turn_seconds < shortest:
                return np.inf
            way = (n * layer[o] + wire[role, o]) / least
            total += price[o]
            if below:
                total += down * way - bonus
            elif at > turn:
                total += way
        return total

    best = np.inf
    for count in range(fewest, rows + 1):
        for layers in itertools.product(range(1, num_layers + 1), repeat=count):
            if sum(layers) != num_layers:
                continue
            for options in itertools.product(range(num_options), repeat=count):
                best = min(best, *(weight(options, layers, turn) for turn in range(count)), np.inf)
    assert found == pytest.approx(best)
    if best < np.inf:
        count = int((np.cumprod(path[0] >= 0)).sum())
        options, layers = tuple(path[0, :count].tolist()), tuple(path[1, :count].tolist())
        assert min(weight(options, layers, t) for t in range(count)) == pytest.approx(best)


def _replayed(forward: Floats, backward: Floats, depths: list[int], microbatches: int) -> float:
    zero = np.zeros(len(forward) - 1)
    depth = np.array([min(each, microbatches) for each in depths])
    times = StageTimes(forward, backward, zero, zero, zero, zero, depth, microbatches)
    return float(pipeline_ends(times, False).max())


@pytest.mark.parametrize("seed", seeds(60))
def test_no_replay_is_shorter_than_its_bottleneck_says(seed: int) -> None:
    """(a), (b) and (c) with the bottleneck's own depth, its turn rounded down as a cell does."""
    rng = np.random.default_rng(seed)
    tight = np.inf
    for _ in range(200):
        count = int(rng.integers(1, 7))
        microbatches = int(rng.integers(count, 20))
        turns = rng.uniform(0.3, 1.0, count) ** rng.choice([0.1, 1.0])
        part = rng.uniform(0.2, 0.5, count)
        forward, backward = turns * part, turns * (1 - part)
        depths = [count - s for s in range(count)]
        seconds = _replayed(forward, backward, depths, microbatches)
        s = int(turns.argmax())
        longest = float(turns[s])
        low = longest * rng.uniform(0.97, 1.0)
        up, below = float(turns[:s].sum()), turns[s + 1 :]
        for down, bonus in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0), (1.5, 0.75)):
            value = microbatches + up / low + float((down * below / low - bonus).sum())
            assert low * value <= seconds * (1 + 1e-9)
            tight = min(tight, seconds / (low * value))
    assert tight < 1.1
