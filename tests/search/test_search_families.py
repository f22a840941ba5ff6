"""Families hold what a target can run, all of it, and nothing that a plan check refuses."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plans"))

from plans_of_many import small_cluster, small_island, small_job, small_model
from random_chosen import random_chosen

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Pins, TrainerOptions
from hetplan.model.layers import Experts
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Sharding,
)
from hetplan.plans.targets import target
from hetplan.search.space.allowed import allowed_cluster, divisors
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family, Mesh

SEARCHED = ("native", "megatron", "flagscale", "torchtitan", "any")


def families(model: ModelSpec, cluster: Cluster, job: Job) -> tuple[Family, ...]:
    return Families(model=model, cluster=allowed_cluster(cluster, job), job=job).families()


def random_question(rng: random.Random, trainer: str) -> tuple[ModelSpec, Cluster, Job]:
    """2 or 3 islands of 1 to 3 nodes of 1, 2 or 4 devices, two of one kind now and then."""
    experts = rng.random() < 0.4 and trainer != "native"
    model = small_model(rng.randint(3, 8), experts=experts, tied=rng.random() < 0.4)
    islands = [
        small_island(f"i{k}", rng.randint(1, 3), rng.choice([1, 2, 4]), out=())
        for k in range(rng.randint(1, 3))
    ]
    if rng.random() < 0.5:
        twin = replace(islands[0], name="twin", nodes=rng.randint(1, 3))
        islands.append(twin)
    if rng.random() < 0.3 and islands[0].nodes > 1:
        islands[0] = replace(islands[0], nodes_out=(0,))
    options = TrainerOptions()
    if trainer in ("megatron", "any") and rng.random() < 0.3:
        options = TrainerOptions(fused_attention=False)
    job = replace(small_job(rng.choice([2, 4, 6, 8, 12]), trainer), trainer=options)
    return model, small_cluster(*islands), job


@pytest.mark.parametrize("trainer", SEARCHED)
def test_every_plan_of_a_family_is_legal_and_comes_back_as_it_was_chosen(trainer: str) -> None:
    rng = random.Random(f"legal {trainer}")
    made = 0
    met = set()
    for _ in range(60):
        model, cluster, job = random_question(rng, trainer)
        found = families(model, cluster, job)
        for family in rng.sample(found, min(8, len(found))):
            chosen = random_chosen(rng, family, model, cluster, job)
            if chosen is None:
                continue
            plan = plan_of(model, cluster, job, chosen)
            assert check_plan(plan, model, cluster, job) == (), chosen
            back = chosen_of(plan, cluster, job)
            # Where every weight has one copy there is nothing to shard.
            sharding = chosen.sharding if plan.optimizer_shards > 1 else Sharding.NONE
            assert back == replace(chosen, sharding=sharding)
            made += 1
            stages = chosen.pipelines[0].stages
            met |= {len(stage.parts) for stage in stages}
            met |= {stage.recompute for stage in stages}
            met |= {family.schedule, plan.sharding}
    assert made > 150
    able = target(trainer)
    wanted = {1, 2, FULL_RECOMPUTE, *able.sharding, *able.schedules[:1]}
    assert wanted <= met
    assert ("interleaved-1f1b" in met) == ("interleaved-1f1b" in able.schedules)


def one_shape_keys(found: tuple[Family, ...]) -> set[tuple[object, ...]]:
    return {
        (
            *(s.tp, s.cp, sum(each.dp for each in mesh.shapes), s.microbatch_size),
            *(s.ep, s.etp, s.sequence_parallel, mesh.islands, tuple(e.dp for e in mesh.shapes)),
            mesh.max_stages,
        )
        for family in found
        for mesh in family.meshes
        for s in mesh.shapes[:1]
    }


def stages_by_hand(cluster: Cluster, at: int, tp: int, size: int) -> int:
    """Stages of `size` devices: nodes one after the other, each filled from its first device."""
    island, held = cluster.islands[at], 0
    nodes = [node for node in range(island.nodes) if node not in island.nodes_out]
    if island.devices_per_node % tp:
        return 0
    if size > island.devices_per_node:
        whole = size / island.devices_per_node
        return int(len(nodes) // whole) if whole == int(whole) else 0
    for _ in nodes:
        free = island.devices_per_node
        while free >= size and island.devices_per_node % size == 0:
            free -= size
            held += 1
    return held


def by_hand(model: ModelSpec, cluster: Cluster, job: Job) -> Iterator[tuple[object, ...]]:
    """Every (shape, islands) of target megatron, from the words of the space."""
    experts = isinstance(model.layer_runs[0].layer.mlp, Experts)
    places: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((at,), (1,)) for at in range(len(cluster.islands))
    ]
    for a, b in product(range(len(cluster.islands)), repeat=2):
        one, two = cluster.islands[a], cluster.islands[b]
        alike = (one.device.kind, one.devices_per_node) == (two.device.kind, two.devices_per_node)
        if a < b and alike:
            nodes = [each.nodes - len(each.nodes_out) for each in (one, two)]
            weights = {(1, 1), tuple(n // max(divisors_of_both(*nodes)) for n in nodes)}
            places += [((a, b), each) for each in weights]
    for tp, cp, dp, size in product((1, 2, 4, 8), (1, 2, 4, 8, 16), range(1, 65), range(1, 65)):
        if job.global_batch_size % (dp * size) or (cp > 1 and job.sequence_length % (2 * cp)):
            continue
        parallel = tp > 1 and job.sequence_length // cp % tp == 0
        if experts and tp > 1 and not parallel:
            continue
        for islands, weights in places:
            if dp % sum(weights):
                continue
            dps = tuple(dp // sum(weights) * weight for weight in weights)
            room = min(
                stages_by_hand(cluster, at, tp, tp * cp * ranks)
                for at, ranks in zip(islands, dps, strict=True)
            )
            if not room:
                continue
            slices = [(1, tp if experts else 1)]
            if experts and len(islands) == 1:
                slices += [
                    (ep, etp)
                    for etp in {1, tp}
                    for ep in (2, 4, 8)
                    if (tp * cp * dp // etp) % ep == 0
                ]
            for ep, etp in slices:
                yield (
                    *(tp, cp, dp, size, ep, etp, parallel, islands, dps),
                    min(room, model.num_layers),
                )


def divisors_of_both(a: int, b: int) -> set[int]:
    return {*divisors(a)} & {*divisors(b)}


def test_megatron_has_every_shape_on_every_island_and_union() -> None:
    rng = random.Random("by hand")
    unions = 0
    for _ in range(25):
        model, cluster, job = random_question(rng, "megatron")
        model = replace(model, tied_embeddings=False)
        if len(cluster.islands) > 1 and cluster.islands[-1].name == "twin":
            unions += 1
        found = one_shape_keys(families(model, cluster, job))
        assert found == set(by_hand(model, cluster, job))
    assert unions > 5


def test_native_shares_a_microbatch_between_unlike_kinds_of_one_region() -> None:
    model = small_model(4)
    near = small_cluster(small_island("a", 1, 2), small_island("b", 2, 1))
    found = families(model, near, small_job(4, "native"))
    mixed = [m for family in found for m in family.meshes if m.islands == (0, 1)]
    splits = {tuple((s.tp, s.dp, s.microbatch_size) for s in mesh.shapes) for mesh in mixed}
    sides = {0: [(1, 1), (1, 2), (2, 1)], 1: [(1, 1), (1, 2)]}
    wanted = {
        ((tp, dp, a), (tq, dq, b))
        for (tp, dp), (tq, dq) in product(sides[0], sides[1])
        for a, b in product(range(1, 5), repeat=2)
        if dp * a + dq * b in (1, 2, 4)
    }
    assert splits == wanted
    apart = replace(near, islands=(near.islands[0], replace(near.islands[1], region="far")))
    for trainer, cluster in (("native", apart), ("flagscale", near), ("megatron", near)):
        for family in families(model, cluster, small_job(4, trainer)):
            assert all(len(mesh.islands) == 1 for mesh in family.meshes)


def test_early_sends_come_beside_waiting_ones() -> None:
    cluster = small_cluster(small_island("a", 1, 4), small_island("b", 1, 4))
    job = small_job(16, "native")
    found = families(small_model(4), cluster, job)
    plain = [family for family in found if family.schedule == "1f1b"]
    early = [replace(f, early_sends=True, most_extra_depth=0) for f in plain if not f.early_sends]
    assert {*early} == {replace(f, most_extra_depth=0) for f in plain if f.early_sends}
    for family in found:
        deepest = max(0, min(8, family.num_microbatches - 2)) if family.early_sends else 0
        assert family.most_extra_depth == deepest
    pinned = families(small_model(4), cluster, replace(job, pin=Pins(depth=3)))
    assert all(f.early_sends and f.most_extra_depth <= 3 for f in pinned)
    waiting = families(small_model(4), cluster, replace(job, pin=Pins(depth=0)))
    assert {*waiting} == {family for family in found if not family.early_sends}


@pytest.mark.parametrize("trainer", SEARCHED)
@pytest.mark.parametrize(
    "pin",
    [
        Pins(tp=2),
        Pins(dp=2),
        Pins(microbatch_size=2),
        Pins(cp=1),
        Pins(cp=2),
        Pins(ep=1),
        Pins(recompute=True),
        Pins(recompute=False),
        Pins(virtual_stages=1),
        Pins(virtual_stages=2),
        Pins(sequence_parallel=False),
        Pins(sharded_optimizer=True),
        Pins(sharded_optimizer=False),
        Pins(same_degrees=True),
    ],
)
def test_pins_leave_the_families_that_keep_them(trainer: str, pin: Pins) -> None:
    model = small_model(8)
    twin = replace(small_island("a", 2, 4), name="c")
    cluster = small_cluster(small_island("a", 2, 4), small_island("b", 1, 4), twin)
    job = small_job(8, trainer)
    free, kept = families(model, cluster, job), families(model, cluster, replace(job, pin=pin))

    def keeps(family: Family, mesh: Mesh) -> bool:
        shapes, dp = mesh.shapes, sum(shape.dp for shape in mesh.shapes)
        one_copy = dp * shapes[0].cp == 1
        full = (FULL_RECOMPUTE,) if pin.recompute else (NO_RECOMPUTE,)
        sharded = family.sharding is not Sharding.NONE
        return (
            {pin.tp or s.tp for s in shapes} == {s.tp for s in shapes}
            and {pin.cp or s.cp for s in shapes} == {s.cp for s in shapes}
            and {pin.ep or s.ep for s in shapes} == {s.ep for s in shapes}
            and all(s.microbatch_size == (pin.microbatch_size or s.microbatch_size) for s in shapes)
            and dp == (pin.dp or dp)
            and family.virtual_stages == (pin.virtual_stages or family.virtual_stages)
            and (pin.recompute is None or family.recompute == full)
            and (not pin.same_degrees or len(mesh.islands) == 1)
            and (pin.sequence_parallel is None or not any(s.sequence_parallel for s in shapes))
            and (pin.sharded_optimizer in (None, sharded) or (one_copy and not sharded))
        )

    assert all(keeps(family, mesh) for family in kept for mesh in family.meshes)
    able = target(trainer)
    missing = (pin.cp == 2 and not able.context_parallel) or (
        pin.virtual_stages == 2 and "interleaved-1f1b" not in able.schedules
    )
    assert bool(kept) != missing
    # Of the free families' meshes none is missing that keeps the pin. Recomputation and sequence
    # parallelism are parts of a family and a shape, which change with the pin.
    if pin.recompute is None and pin.sequence_parallel is None and not pin.sharded_optimizer:
        wanted = {
            (family.samples, family.sharding, mesh)
            for family in free
            for mesh in family.meshes
            if family.virtual_stages == 1
            and keeps(replace(family, virtual_stages=pin.virtual_stages or 1), mesh)
            and (family.sharding is Sharding.NONE or sum(s.dp * s.cp for s in mesh.shapes) > 1)
        }
        found = {(f.samples, f.sharding, m) for f in kept for m in f.meshes}
        assert found >= wanted or pin.virtual_stages == 2


def test_interleaving_has_chunks_stages_and_microbatches() -> None:
    cluster = small_cluster(small_island("a", 1, 8))
    found = families(small_model(12), cluster, small_job(12, "megatron"))
    for family in found:
        room = max(mesh.max_stages for mesh in family.meshes)
        can = any(
            p * family.virtual_stages <= 12 and family.num_microbatches % p == 0
            for p in range(3, room + 1)
        )
        assert family.virtual_stages == 1 or can
    assert {family.virtual_stages for family in found} == {1, 2, 3, 4}


def test_thousands_of_families_share_their_meshes() -> None:
    configs = shipped_folder("configs")
    model = load_model(configs / "models" / "llama-140b.yaml")
    cluster = load_cluster(configs / "clusters" / "mixed-768.yaml")
    job = load_job(configs / "jobs" / "llama-140b.yaml")
    islands = tuple(
        replace(island, name=f"{island.name}-{k}") for k in range(4) for island in cluster.islands
    )
    many = replace(cluster, islands=islands, links=(), within_region=islands[0].inter_node)
    found = families(model, many, job)
    assert len(found) > 10_000
    # What a cost is reused by: many families stand on one tuple of meshes.
    assert len({id(family.meshes) for family in found}) < len(found) / 10
    assert found[::100] == families(model, many, job)[::100]
