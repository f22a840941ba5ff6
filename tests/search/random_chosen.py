"""Random plans out of families: any meshes with islands of their own, any cut that they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan, ChosenStage, Part
from hetplan.plans.pieces import own_depth
from hetplan.plans.targets import target
from hetplan.search.space.allowed import ends_allowed, stage_limit
from hetplan.search.space.family import Family, Mesh


def random_chosen(
    rng: random.Random, family: Family, model: ModelSpec, cluster: Cluster, job: Job
) -> ChosenPlan | None:
    """A plan of the family, memory not asked; None where this draw has none."""
    slots = _slots(rng, family, model, job)
    if not slots or not ends_allowed(target(job.target), model, slots[0], slots[-1]):
        return None
    count, virtual = len(slots), family.virtual_stages
    layers = _cut(rng, model.num_layers, count, virtual)
    extra = _extra_depths(rng, family, slots)
    stages = tuple(
        ChosenStage(
            parts=tuple(
                Part(island=cluster.islands[island].name, shape=shape)
                for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
            ),
            layers=dealt(layers[s], virtual),
            recompute=rng.choice(family.recompute),
            warmup_depth=_depth(family, s, count, extra[s]),
        )
        for s, mesh in enumerate(slots)
    )
    return family.plan(stages)


def dealt(layers: int, virtual: int) -> tuple[int, ...]:
    """Layers of each chunk, the first ones with one more."""
    return tuple(layers // virtual + (k < layers % virtual) for k in range(virtual))


def _slots(rng: random.Random, family: Family, model: ModelSpec, job: Job) -> list[Mesh]:
    limit = min(
        stage_limit(job, model, family.num_microbatches), model.num_layers // family.virtual_stages
    )
    limit = 1 if family.one_stage else limit
    taken, found = 0, []
    for mesh in rng.sample(family.meshes, len(family.meshes)):
        room = min(mesh.max_stages, limit - len(found))
        if not taken & mesh.mask and room and (not found or rng.random() < 0.6):
            found += [mesh] * rng.randint(1, room)
            taken |= mesh.mask
    interleaved = family.virtual_stages > 1
    if interleaved and (len(found) < 3 or family.num_microbatches % len(found)):
        return []
    return found if job.pin.pp in (None, len(found)) else []


def _cut(rng: random.Random, layers: int, count: int, virtual: int) -> list[int]:
    found = [virtual] * count
    for _ in range(layers - count * virtual):
        found[rng.randrange(count)] += 1
    return found


def _extra_depths(rng: random.Random, family: Family, slots: Sequence[Mesh]) -> list[int]:
    extra = [0] * len(slots)
    for s in range(len(slots) - 2, -1, -1):
        extra[s] = extra[s + 1]
        if slots[s] is not slots[s + 1] and extra[s] < family.most_extra_depth:
            extra[s] += rng.randint(0, family.most_extra_depth - extra[s])
    return extra


def _depth(family: Family, s: int, count: int, extra: int) -> int:
    m = family.num_microbatches
    own = own_depth(family.schedule, s, count, m, family.virtual_stages)
    return min(own + extra, m) if family.virtual_stages == 1 else own
