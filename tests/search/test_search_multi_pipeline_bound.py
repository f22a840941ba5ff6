"""The cheapest path against all paths, and the inequalities of a bottleneck against replays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from random_cases import seeds
from search_jobs import cluster, island, job, model

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.kernel import StageTimes, pipeline_ends
from hetplan.predict.fit import fit_populations
from hetplan.search.multi_pipeline.bound import _Cell
from hetplan.search.multi_pipeline.paths import Path
from hetplan.search.multi_pipeline.pricing import Bools, cheapest_path, weigh_turns
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE
from hetplan.search.table_maker import TableMaker


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

    values = np.empty((phases, 8, rows + 1, num_layers + 1))
    chosen = np.empty(values.shape, np.int64)
    weigh_turns(
        values, chosen, layer, wire, serial, most_layers, price, allowed, least, most, down, bonus,
    )  # fmt: skip
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
            if n > most_layers[role, o, at + 1] or n * layer[o] + serial[role, o] > most:
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


@pytest.mark.parametrize("alike", [False, True])
def test_parts_of_a_cell_allow_every_legal_row(alike: bool) -> None:
    """Stages B A B: of one island each they cannot be; of two alike islands of B's they can."""
    names = ["a", "b", "c"] if alike else ["a", "b"]
    kinds = {name: "slow" if name == "a" else "fast" for name in names}
    where = cluster(*(island(name, kind=kinds[name], nodes=2) for name in names))
    asked, wanted = model(6), job(4, target="native")
    maker = TableMaker(model=asked, cluster=where, job=wanted, predictor=fit_populations(()))
    pricer = next(
        each for each in MultiPipelineSolver(0, maker)._pricers if each.options.samples == 1
    )
    options = pricer.options
    one = {
        name: next(
            o
            for o, m in enumerate(options.mesh.tolist())
            if len(options.meshes[m].islands) == 1
            and kinds[where.islands[options.meshes[m].islands[0]].name] == kinds[name]
        )
        for name in names
    }
    every = np.ones((1, len(options.mesh)), dtype=np.bool_)

    def parts_of(row: tuple[int, ...]) -> tuple[Bools, ...]:
        path = Path(
            samples=1, options=row, layers=(2,) * len(row), bottleneck_seconds=1.0,
            use=(0.0,) * len(options.devices), weight_without_price=0.0, microbatches=1,
            surcharge=(), mode=pricer.modes[0],
        )  # fmt: skip
        return _Cell(pricer, 1.0, 1.0, every, path).split()

    def allows(part: Bools, row: tuple[int, ...]) -> bool:
        back, front = part[0], part[-1]
        return any(
            back[list(row[:cut])].all() and front[list(row[cut:])].all()
            for cut in range(len(row) + 1)
        )

    legal = [
        tuple(one[name] for name in row)
        for count in range(1, len(names) + 1)
        for row in itertools.permutations(names, count)
    ]
    for path in ((one["a"], one["b"], one["a"]), (one["b"], one["a"], one["b"])):
        parts = parts_of(path)
        # Islands of a kind that has only one are told apart, others are not.
        assert bool(parts) != alike
        for row in legal:
            assert not parts or any(allows(part, row) for part in parts)
        assert not any(allows(part, path) for part in parts)
