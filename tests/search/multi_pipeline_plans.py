"""Random plans of several pipelines, with unequal shapes and mixed stages, whose sends wait."""

from __future__ import annotations

import random

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import RecomputeGranularity, Schedule, Sharding
from hetplan.search.multi_pipeline.stage_options import meshes_by_samples

_Meshes = dict[int, set[tuple[tuple[int, ...], tuple[Shape, ...]]]]
"""Islands and shapes by samples per microbatch."""


def random_several(
    rng: random.Random, model: ModelSpec, cluster: Cluster, job: Job
) -> ChosenPlan | None:
    """A plan; None where no draw of a few has one."""
    meshes = {
        samples: {(mesh.islands, mesh.shapes) for mesh in each}
        for samples, each in meshes_by_samples(model, cluster, job).items()
    }
    draws = (_drawn(rng, model, cluster, job, meshes) for _ in range(30))
    return next((found for found in draws if found is not None), None)


def _drawn(
    rng: random.Random, model: ModelSpec, cluster: Cluster, job: Job, meshes: _Meshes
) -> ChosenPlan | None:
    pipelines: list[ChosenPipeline] = []
    free = {one.name: one.num_usable_devices for one in cluster.islands}
    left = job.global_batch_size
    for remaining in range(rng.choice((2, 2, 3)), 0, -1):
        found = _pipeline(rng, model, cluster, job, free, left, last=remaining == 1)
        if found is None or not _allowed(found, meshes, cluster):
            return None
        pipelines.append(found)
        left -= found.num_microbatches * sum(p.shape.samples for p in found.stages[0].parts)
        if left == 0:
            break
    if left or len(pipelines) == 1:
        return None
    sharding = rng.choice((Sharding.NONE, Sharding.OPTIMIZER))
    return ChosenPlan(pipelines=tuple(pipelines), sharding=sharding)


def _allowed(
    pipeline: ChosenPipeline,
    meshes: _Meshes,
    cluster: Cluster,
) -> bool:
    """Whether its meshes are of the declared space: few of the mixed ones are."""
    numbers = {island.name: at for at, island in enumerate(cluster.islands)}
    for stage in pipeline.stages:
        parts = sorted(stage.parts, key=lambda part: numbers[part.island])
        islands = tuple(numbers[part.island] for part in parts)
        shapes = tuple(part.shape for part in parts)
        if (islands, shapes) not in meshes.get(sum(each.samples for each in shapes), set()):
            return False
    return True


def _pipeline(
    rng: random.Random,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    free: dict[str, int],
    batch: int,
    *,
    last: bool,
) -> ChosenPipeline | None:
    every = job.global_batch_size
    samples = rng.choice([each for each in (1, 2, 3, 4) if each <= batch and every % each == 0])
    counts = [m for m in range(1, batch // samples + 1) if not last or m * samples == batch]
    if not counts:
        return None
    count = rng.choice(counts)
    rows: list[tuple[Part, ...]] = []
    names = rng.sample(sorted(free), len(free))
    while names and (not rows or rng.random() < 0.6):
        taken = [names.pop() for _ in range(min(len(names), rng.choice((1, 1, 1, 2))))]
        parts = _parts(rng, model, cluster, free, taken, samples)
        if parts is None:
            return None
        most = min(free[part.island] // part.shape.num_devices for part in parts)
        if most == 0:
            return None
        stages = rng.randint(1, most)
        for part in parts:
            free[part.island] -= stages * part.shape.num_devices
        rows += [parts] * stages
    if not rows or len(rows) > min(model.num_layers, count):
        return None
    layers = [1] * len(rows)
    for _ in range(model.num_layers - len(rows)):
        layers[rng.randrange(len(rows))] += 1
    return ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=parts,
                layers=(layers[s],),
                recompute=rng.choice((RecomputeGranularity.NONE, RecomputeGranularity.FULL)),
                warmup_depth=min(len(rows) - s, count),
            )
            for s, parts in enumerate(rows)
        ),
        num_microbatches=count,
        schedule=Schedule(name="1f1b"),
    )


def _parts(
    rng: random.Random,
    model: ModelSpec,
    cluster: Cluster,
    free: dict[str, int],
    taken: list[str],
    samples: int,
) -> tuple[Part, ...] | None:
    """One part per island, which share a microbatch."""
    shares = [samples] if len(taken) == 1 else [1, samples - 1]
    if min(shares) < 1:
        return None
    found = []
    for name, samples in zip(taken, shares, strict=True):
        per_node = cluster.island(name).devices_per_node
        tp = rng.choice([each for each in (1, 2) if per_node % each == 0])
        dp = rng.choice([each for each in range(1, samples + 1) if samples % each == 0])
        size = tp * dp
        if (per_node % size and size % per_node) or size > free[name]:
            return None
        found.append(Part(island=name, shape=Shape(tp=tp, dp=dp, microbatch_size=samples // dp)))
    return tuple(found)
