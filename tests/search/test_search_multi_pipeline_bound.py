"""The cheapest pipeline within a time against all pipelines, and its chains against replays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from random_cases import seeds

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.search.multi_pipeline import within
from hetplan.search.multi_pipeline.stage_options import MeshOptions
from hetplan.search.multi_pipeline.within import WithinPricer, with_stage
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE


def _role(at: int, count: int) -> int:
    if count == 1:
        return BOTH
    return LAST if at == 0 else FIRST if at == count - 1 else MIDDLE


class _Memory:
    """Most layers by role, option and microbatches in flight, whatever the step has."""

    def __init__(self, most: Ints) -> None:
        self.most = most

    def most_layers(self, num_microbatches: int, flights: int) -> Ints:
        known = self.most.shape[-1]
        return self.most[..., np.minimum(np.arange(flights + 1), known - 1)]


def _options(rng: np.random.Generator, layers: int, rows: int, rendezvous: bool) -> MeshOptions:
    count = int(rng.integers(1, 4))
    most = np.sort(rng.integers(0, 5, (4, count, rows + 1)))[..., ::-1].copy()
    return MeshOptions(
        num_layers=layers,
        enough_microbatches=bool(rng.random() < 0.5),
        rendezvous=rendezvous,
        forward=rng.uniform(0.2, 0.5, count),
        backward=rng.uniform(0.2, 1.0, count),
        extra_forward=rng.uniform(0.0, 0.3, (4, count)),
        extra_backward=rng.uniform(0.0, 0.3, (4, count)),
        arrive_forward=rng.uniform(0.0, 0.2, count),
        arrive_backward=rng.uniform(0.0, 0.2, count),
        memory=_Memory(most),  # type: ignore[arg-type]
        samples=1,
        most_microbatches=int(rng.integers(1, 12)),
        fewest_stages=int(rng.integers(1, 3)),
        most_stages=rows,
        devices=np.array([8.0, 4.0]),
        meshes=(),
        alike={},
        mesh=np.arange(count),
        recompute=np.zeros(count, np.int64),
        use=rng.integers(0, 3, (count, 2)) + np.array([0.0, 0.5]),
    )


def _times(
    options: MeshOptions, chosen: tuple[int, ...], layers: tuple[int, ...], microbatches: int
) -> StageTimes:
    """Of these stages, the last stage first."""
    count = len(chosen)
    o, n = np.array(chosen[::-1]), np.array(layers[::-1])
    roles = np.array([_role(at, count) for at in range(count)][::-1])
    zero = np.zeros(count - 1)
    return StageTimes(
        options.forward[o] * n + options.extra_forward[roles, o],
        options.backward[o] * n + options.extra_backward[roles, o],
        options.arrive_forward[o[1:]],
        options.arrive_backward[o[:-1]],
        zero,
        zero,
        np.minimum(np.arange(count, 0, -1), microbatches),
        microbatches,
    )


def _cheapest_replayed(
    options: MeshOptions, microbatches: int, seconds: float, prices: Floats
) -> float:
    """Of every pipeline whose replay ends within the time."""
    best, price = np.inf, options.use @ prices
    most = options.memory.most_layers(microbatches, options.most_stages)
    for count in range(options.fewest_stages, options.most_stages + 1):
        if options.enough_microbatches and microbatches < count:
            break
        for layers in itertools.product(range(1, options.num_layers + 1), repeat=count):
            if sum(layers) != options.num_layers:
                continue
            for chosen in itertools.product(range(len(price)), repeat=count):
                cost = float(price[[*chosen]].sum())
                fits = all(
                    n <= most[_role(at, count), o, at + 1]
                    for at, (o, n) in enumerate(zip(chosen, layers, strict=True))
                )
                if fits and cost < best:
                    times = _times(options, chosen, layers, microbatches)
                    if float(pipeline_ends(times, options.rendezvous).max()) <= seconds:
                        best = cost
    return best


@pytest.mark.parametrize("seed", seeds(60))
def test_no_pipeline_that_ends_in_time_is_cheaper(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    options = _options(rng, int(rng.integers(1, 6)), 4, rendezvous=bool(rng.random() < 0.7))
    batch = options.most_microbatches + 1
    prices, pricer = rng.uniform(0.1, 1.5, 2), WithinPricer((options,), batch)
    seconds = float(rng.uniform(1.0, 15.0))
    bins = ((1, 1), (4, 8), (16, 32))[int(rng.integers(3))]
    if rng.random() < 0.5:
        monkeypatch.setattr(within, "_RATIO", 1.6)
    asked = pricer.counts(seconds)
    numbers = [n for fewest, most in asked for n in range(fewest, most + 1)]
    assert numbers == [*range(1, len(numbers) + 1)]
    for counts in asked:
        found = pricer.cheapest(counts, seconds, prices, bins)
        for microbatches in range(counts[0], counts[1] + 1):
            cheapest = _cheapest_replayed(options, microbatches, seconds, prices)
            if cheapest <= microbatches:
                assert found is not None
                assert found.price <= cheapest * (1 + 1e-9)
                assert found.microbatches == counts[1]
                assert found.use == pytest.approx(
                    options.use[[o for _, o in found.options]].sum(axis=0)
                )
    # None in time has more microbatches than were asked about.
    for microbatches in range(len(numbers) + 1, options.most_microbatches + 1):
        assert _cheapest_replayed(options, microbatches, seconds, prices) == np.inf


@pytest.mark.parametrize("seed", seeds(30))
def test_stages_of_all_numbers_of_samples_cost_no_more_than_those_of_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, rendezvous = int(rng.integers(1, 6)), bool(rng.random() < 0.7)
    tables = [_options(rng, layers, int(rng.integers(2, 5)), rendezvous) for _ in range(2)]
    first = tables[0]
    tables[1] = replace(
        tables[1],
        samples=2,
        most_microbatches=(first.most_microbatches + 1) // 2,
        fewest_stages=first.fewest_stages,
        enough_microbatches=first.enough_microbatches,
    )
    prices, seconds = rng.uniform(0.1, 1.5, 2), float(rng.uniform(1.0, 15.0))
    batch = max(first.most_microbatches, 2 * tables[1].most_microbatches) + 1
    pricer = WithinPricer(tables, batch)
    asked = pricer.counts(seconds)
    for table in tables:
        for counts in WithinPricer((table,), batch).counts(seconds):
            assert counts in asked
            alone = _cheapest_replayed(table, counts[0], seconds, prices)
            if alone <= counts[0] and counts[0] * table.samples < batch:
                found = pricer.cheapest(counts, seconds, prices, (8, 16))
                assert found is not None
                assert found.price <= alone * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(60))
def test_no_replay_is_shorter_than_its_chains_and_many_are_no_longer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tight = 0
    for _ in range(100):
        rows, microbatches = int(rng.integers(1, 7)), int(rng.integers(1, 20))
        options = _options(rng, 8, 6, rendezvous=bool(rng.random() < 0.7))
        chosen = tuple(rng.integers(0, len(options.mesh), rows).tolist())
        layers = tuple(rng.integers(1, 4, rows).tolist())
        times = _times(options, chosen, layers, microbatches)
        below, ends = 0.0, 0.0
        for at in range(rows):
            s = rows - 1 - at
            f, b = float(times.forward[s]), float(times.backward[s])
            if options.rendezvous:
                f += float(times.send_forward[s - 1]) if s else 0.0
                b += float(times.send_backward[s]) if at else 0.0
            depth = min(at + 1, microbatches)
            ends = with_stage(below, ends, f + b, min(f, b), microbatches, depth)
            below += f + b
        seconds = float(pipeline_ends(times, options.rendezvous).max())
        assert ends <= seconds * (1 + 1e-9)
        tight += ends >= seconds * 0.999
    assert tight > 5
