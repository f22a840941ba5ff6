"""From the oracle's plans to the product's, to hold one against the other."""

from __future__ import annotations

from oracle_costs import PlacedPipeline, shape_of
from oracle_space import Row, SmallSpace

from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Schedule, Sharding


def chosen_plan(
    space: SmallSpace,
    pipelines: tuple[PlacedPipeline, ...],
    rows: tuple[Row, ...],
    sharding: Sharding,
) -> ChosenPlan:
    """The same choices in the product's words; devices are left to it."""
    return ChosenPlan(
        pipelines=tuple(
            _pipeline(space, each, row) for each, row in zip(pipelines, rows, strict=True)
        ),
        sharding=sharding,
        early_sends=rows[0].early,
    )


def _pipeline(space: SmallSpace, placed: PlacedPipeline, row: Row) -> ChosenPipeline:
    # Layers of multi-token prediction go with the head.
    islands, last = space.cluster.islands, len(space.model.layers) - 1 - space.model.num_mtp_layers
    m, count = placed.microbatches, len(placed.stages)
    name = "1f1b" if row.virtual == 1 else "interleaved-1f1b"
    stages = []
    for s, (stage, mesh) in enumerate(zip(placed.stages, row.slots, strict=True)):
        depth = stage.depth
        if row.virtual > 1:
            depth = own_depth(name, s, count, m, row.virtual)
        stages.append(
            ChosenStage(
                parts=tuple(
                    Part(island=islands[at].name, shape=shape_of(replica))
                    for (at, _), replica in zip(mesh.parts, stage.replicas, strict=True)
                ),
                layers=tuple(min(stop, last) - max(start, 1) for start, stop in stage.chunks),
                recompute=stage.recompute,
                warmup_depth=depth,
            )
        )
    return ChosenPipeline(
        stages=tuple(stages),
        num_microbatches=m,
        schedule=Schedule(name=name, virtual_stages=row.virtual),
    )
