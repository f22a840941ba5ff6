"""Sets of bytes that move, against every rank's set listed element by element; and their times."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest
from cost_fakes import job, link, model, two_islands
from estimate_plans import CLUSTER, FREE, expert_model, plan_of, plan_with, stages_of
from hypothesis import given, settings
from plans_of_many import Case, legal_cases, two_pipelines
from random_cases import seeds

from hetplan.cluster.spec import Cluster
from hetplan.cost.memory.device import weights_at
from hetplan.cost.moving import (
    GONE,
    STORAGE,
    Cell,
    Held,
    Moving,
    Part,
    cells,
    deliveries,
    laid_near,
    moving,
    on_devices,
    parts_of,
    same_devices,
    transfers,
    used,
)
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import experts_as_the_rest, stage_shards
from hetplan.plans.plan import Plan, Replica, Sharding
from hetplan.plans.ranks import RankRow, rank_rows

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
GRID = 8
"""Columns and rows of a part in the listing; every degree and shard of these tests divides it."""

Element = tuple[object, ...]


def moved(found: Sequence[Cell], cluster: Cluster, *, storage_bytes_per_second: float) -> Moving:
    given_out = transfers(found, cluster)
    return moving(given_out, cluster, storage_bytes_per_second=storage_bytes_per_second)


def bytes_of(asked: Job) -> tuple[int, int]:
    """Of a weight and of its optimizer state."""
    wide = asked.precision is not Precision.FLOAT32
    adam = 8 if asked.optimizer is Optimizer.ADAMW else 0
    return asked.precision.bytes_per_element, adam + 4 * wide


def listed(plan: Plan, shape: ModelSpec, cluster: Cluster, asked: Job) -> dict[int, set[Element]]:
    """Every element that each device holds: (layer, part, weight or state, column, row)."""
    held: dict[int, set[Element]] = defaultdict(set)
    levels = tuple(Sharding)
    for row in rank_rows(plan, cluster):
        stage = plan.pipelines[row.pipeline].stages[row.stage]
        replica = stage.replicas[0]
        copy = row.dp * replica.cp + row.cp
        place = copy * replica.tp + row.tp
        shards = stage_shards(plan.optimizer_shards, stage)
        for position in (at for chunk in stage.chunks for at in range(chunk.start, chunk.stop)):
            for part, size in parts_of(shape, position, 2):
                tied = shape.tied_embeddings and part.what == "vocabulary"
                if not size and not tied:
                    continue
                number, count = copy, shards
                if part.what == "experts":
                    group = replica.ep * replica.etp
                    number = place // group
                    if not experts_as_the_rest(replica):
                        count = gcd(plan.optimizer_shards, replica.num_devices // group)
                name = ("tied",) if tied else (position, part.what, part.most)
                for kind, level in enumerate((Sharding.PARAMETERS, Sharding.OPTIMIZER)):
                    split = levels.index(plan.sharding) >= levels.index(level)
                    for column in columns(plan, replica, row, part):
                        held[row.device] |= {
                            (*name, kind, column, at)
                            for at in range(GRID)
                            if not split or at * count // GRID == number % count
                        }
    return held


def columns(plan: Plan, replica: Replica, row: RankRow, part: Part) -> Iterator[int]:
    """The columns of a part that a rank holds; rows of the vocabulary; slices of experts."""
    if part.what == "vocabulary":
        each = plan.padded_vocab_size // replica.tp
        yield from (at for at in range(part.most) if at // each == row.tp)
    elif part.what == "experts":
        per = part.most // replica.ep
        for expert in range(part.most):
            for slice_ in range(GRID):
                if expert // per == row.ep and slice_ * replica.etp // GRID == row.etp:
                    yield GRID * expert + slice_
    else:
        degree = min(replica.tp, part.most or GRID)
        mine = row.tp * degree // replica.tp
        yield from (at for at in range(GRID) if at * degree // GRID == mine)


def weigh(elements: set[Element], shape: ModelSpec, asked: Job) -> float:
    """Bytes of a set."""
    sizes = {
        (position, part.what, part.most): size
        for position in range(len(shape.layers))
        for part, size in parts_of(shape, position, 2)
    }
    total = 0.0
    for *name, kind, _, _ in elements:
        if name == ["tied"]:
            size, across = float(shape.vocabulary_matrix()), shape.vocab_size
        else:
            size = sizes[tuple(name)]
            across = {"split": GRID, "vocabulary": name[2], "experts": GRID * name[2]}[name[1]]
        total += bytes_of(asked)[kind] * size / across / GRID
    return total


def random_plan(rng: random.Random, shape: ModelSpec, asked: Job) -> Plan:
    """One or two pipelines with degrees of their own."""
    experts = shape.layer_runs[0].layer != model().layer_runs[0].layer
    pipelines, at, total = [], 4 * rng.randint(0, 2), len(shape.layers)
    for _ in range(rng.randint(1, 2)):
        count, tp = rng.randint(1, 2), rng.choice([1, 2, 4])
        cp = rng.choice([1, 2]) if tp < 4 else 1
        size = rng.choice([4, 8])
        ep = rng.choice([1, 2, 4]) if experts else 1
        etp = rng.choice([1, tp]) if experts and size % (ep * tp) == 0 else 1
        cuts = [[0, *sorted(rng.sample(range(2, total - 1), count - 1))]]
        stages = stages_of(
            cuts, [size] * count, total, first_device=at, num_microbatches=2,
            tp=tp, cp=cp, ep=ep, etp=etp,
        )  # fmt: skip
        pipelines.append((stages, 2))
        at += size * count
    sharding = rng.choice([*Sharding])
    shards = 1
    if sharding is not Sharding.NONE:
        shards = rng.choice([2, 8])
    return plan_with(shape, CLUSTER, asked, pipelines, sharding=sharding, shards=shards)


def check_moves(
    old: Plan | None, new: Plan, shape: ModelSpec, cluster: Cluster, asked: Job, now: Sequence[int]
) -> None:
    """Needed, held and moved of every device are what its sets of elements say."""
    held = None if old is None else Held(plan=old, now=tuple(now))
    found = [*cells(held, new, shape, asked)]
    had: dict[int, set[Element]] = defaultdict(set)
    for device, elements in ({} if old is None else listed(old, shape, cluster, asked)).items():
        if now[device] != GONE:
            had[now[device]] |= elements
    needs = listed(new, shape, cluster, asked)
    counted: dict[str, Counter[int]] = {
        "needed": Counter(),
        "held": Counter(),
        "lacking": Counter(),
    }
    everywhere = set().union(*had.values()) if had else set()
    for source, target, size in deliveries(found, cluster):
        counted["needed"][target] += size  # type: ignore[assignment]
        counted["held"][target] += size * (source == target)  # type: ignore[assignment]
    for cell in found:
        if not cell.holders:
            for target in cell.needers:
                counted["lacking"][target] += cell.size  # type: ignore[assignment]
    for device, elements in needs.items():
        for name, wanted in (
            ("needed", elements),
            ("held", elements & had[device]),
            ("lacking", elements - everywhere),
        ):
            expected = weigh(wanted, shape, asked)
            assert counted[name][device] == pytest.approx(expected, rel=1e-9, abs=1e-6), name
    whole = moved(found, cluster, storage_bytes_per_second=1e9)
    assert whole.needed_bytes == pytest.approx(
        whole.held_bytes + whole.sent_bytes + whole.read_bytes, rel=1e-9
    )
    check_sources(found, cluster)


def check_sources(found: Sequence[Cell], cluster: Cluster) -> None:
    """Who sends a cell has it, or has received it before; each needer gets it once."""
    given_out = deliveries(found, cluster)
    for cell in found:
        have, served = set(cell.holders), []
        for _ in cell.needers:
            source, target, size = next(given_out)
            assert size == cell.size
            assert source in have or (source == STORAGE and target not in have)
            have.add(target)
            served.append(target)
        assert sorted(served) == sorted(cell.needers)
    assert next(given_out, None) is None


@pytest.mark.parametrize("seed", seeds(12))
def test_moves_between_any_two_plans_are_those_of_sets_of_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.choice([model(num_layers=4), expert_model(4, num_layers=4)])
    shape = replace(shape, vocab_size=rng.choice([30, 32]), tied_embeddings=rng.random() < 0.4)
    asked = rng.choice([FREE, replace(FREE, precision=Precision.BFLOAT16)])
    old, new = random_plan(rng, shape, asked), random_plan(rng, shape, asked)
    now = list(range(CLUSTER.num_devices))
    for node in rng.sample(range(CLUSTER.num_devices // 4), rng.randint(0, 2)):
        now[4 * node : 4 * node + 4] = [GONE] * 4
    check_moves(old, new, shape, CLUSTER, asked, now)
    check_moves(None, new, shape, CLUSTER, asked, now)


@settings(max_examples=15)
@given(case=legal_cases(most_pipelines=2))
def test_a_plan_that_stays_moves_nothing(case: Case) -> None:
    now = tuple(range(case.cluster.num_devices))
    found = [*cells(Held(plan=case.plan, now=now), case.plan, case.model, case.job)]
    whole = moved(found, case.cluster, storage_bytes_per_second=1.0)
    assert whole.needed_bytes == whole.held_bytes > 0
    assert (whole.seconds, whole.links) == (0.0, ())
    assert laid_near(found, case.plan, case.cluster).pipelines == case.plan.pipelines


@pytest.mark.parametrize(
    ("name", "tp", "ep", "etp"),
    [
        ("llama-3-70b", 8, 1, 1),
        ("llama-3-70b", 16, 1, 1),
        ("gpt3-175b", 4, 1, 1),
        ("deepseek-v3", 4, 8, 1),
        ("mixtral-8x7b", 4, 2, 2),
        ("qwen3-30b-a3b", 2, 16, 1),
    ],
)
def test_parts_of_a_layer_sum_to_what_the_memory_model_has(
    name: str, tp: int, ep: int, etp: int
) -> None:
    shape = load_model(CONFIGS / f"{name}.yaml")
    shape = replace(shape, vocab_size=-(-shape.vocab_size // tp) * tp)
    for position in {0, 1, shape.num_layers, len(shape.layers) - 1}:
        dense = routed = 0.0
        for part, size in parts_of(shape, position, 2):
            if part.what == "experts":
                routed += size / (ep * etp)
            else:
                most = tp if part.what == "vocabulary" else min(tp, part.most or tp)
                dense += size / most
        if shape.tied_embeddings and position == len(shape.layers) - 1:
            dense += shape.vocabulary_matrix(tp)  # counted with the embedding
        known = weights_at(shape, position, tp, ep, etp)
        assert (dense, routed) == pytest.approx((known.dense, known.routed), rel=1e-9)


def test_bytes_needed_are_those_of_the_memory_model() -> None:
    shape, asked = replace(model(), vocab_size=1024), job()
    plan = plan_of((8, 8), shape=shape, tp=2, sharding=Sharding.OPTIMIZER, shards=4)
    found = [*cells(None, plan, shape, asked)]
    needed: Counter[int] = Counter()
    for _, target, size in deliveries(found, CLUSTER):
        needed[target] += size  # type: ignore[assignment]
    held = sum(weights_at(shape, at, 2).total for at in range(5))
    assert needed[0] == pytest.approx(held * (4 + 8 / 4), rel=1e-12)


def test_one_cell_crosses_a_slow_link_once_and_takes_its_bytes_over_the_narrowest() -> None:
    cluster = two_islands()  # a: devices 0-7 in nodes of 4, b: 8-15
    found = [Cell(2e9, (0,), tuple(range(8, 16)))]
    given_out = [*deliveries(found, cluster)]
    assert [source for source, _, _ in given_out] == [0, 8, 9, 10, 11, 12, 13, 14]
    whole = moved(found, cluster, storage_bytes_per_second=1e12)
    assert {str(each.link): each.bytes for each in whole.links} == {
        "a to b": 2e9, "b, between nodes": 2e9, "b, inside a node": 12e9,
    }  # fmt: skip
    slow = cluster.link_between("a", "b")
    assert whole.send_seconds == pytest.approx(2.0 + slow.latency_seconds)
    wide = replace(cluster, links=(replace(cluster.links[0], link=link(2e9, 5e-3, staged=True)),))
    assert moved(found, wide, storage_bytes_per_second=1.0).send_seconds == pytest.approx(1.005)


def test_a_checkpoint_is_read_once_per_island() -> None:
    found = [Cell(1e9, (), tuple(range(16)))]
    whole = moved(found, two_islands(), storage_bytes_per_second=1e9)
    assert (whole.read_bytes, whole.read_seconds) == (2e9, 2.0)
    assert whole.sent_bytes == 14e9
    # With storage to spare the NICs of the node that reads most are the limit: 4 of 10 GB/s.
    fast = moved(found, two_islands(), storage_bytes_per_second=1e15)
    assert fast.read_seconds == pytest.approx(1e9 / 40e9)


@pytest.mark.parametrize("seed", seeds(6))
def test_plans_are_laid_where_less_moves_and_stay_legal(seed: int) -> None:
    rng = random.Random(seed)
    case = two_pipelines(tied=True)
    cluster = case.cluster
    nodes = {"fast": [0, 1, 2], "slow": [3, 4]}
    order = [node for each in nodes.values() for node in rng.sample(each, len(each))]
    now = tuple(4 * order[device // 4] + device % 4 for device in range(20))
    held = Held(plan=case.plan, now=now)
    found = [*cells(held, case.plan, case.model, case.job)]
    near = laid_near(found, case.plan, cluster)
    assert not check_plan(near, case.model, cluster, case.job)
    again = [*cells(held, near, case.model, case.job)]
    at_once, then = (moved(each, cluster, storage_bytes_per_second=1e9) for each in (found, again))
    assert then.held_bytes == then.needed_bytes >= at_once.held_bytes
    assert near.pipelines == on_devices(case.plan, now, 20).pipelines


def test_devices_are_the_same_by_island_and_name() -> None:
    old = two_islands()
    one = replace(old.islands[0], nodes=3, nodes_out=(1,))
    new = replace(old, islands=(old.islands[1], one))
    now = same_devices(old, new)
    assert now == (8, 9, 10, 11, *[GONE] * 4, *range(8))
    assert same_devices(old, new, leaving=True)[4:8] == (12, 13, 14, 15)
    named = replace(old, islands=(replace(old.islands[0], node_names=("x", "y")), old.islands[1]))
    other = replace(named.islands[0], node_names=("y", "z"))
    assert same_devices(named, named.with_island(other))[:8] == (*[GONE] * 4, 0, 1, 2, 3)
    unlike = replace(old.islands[0], devices_per_node=2)
    assert set(same_devices(old, old.with_island(unlike))[:8]) == {GONE}
    assert used(plan_of((4, 4))).tolist() == [*range(8)]
