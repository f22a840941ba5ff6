"""What a row of slots is as a plan, before devices are numbered."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.plan import Schedule
from hetplan.search.costs.maker import transformer_layers
from hetplan.search.families.space import FIRST, LAST, Ints, Space


def chosen_of_row(
    space: Space,
    islands: Sequence[str],
    mesh: Ints,
    variant: Ints,
    units: Ints,
    extra: Ints,
) -> ChosenPlan:
    """The plan of these slots; `islands` are the names of the cluster's."""
    family, slots = space.family, len(mesh)
    stages = []
    for s in range(slots):
        chosen = family.meshes[int(mesh[s])]
        role = FIRST * (s == 0) + LAST * (s == slots - 1)
        stages.append(
            ChosenStage(
                parts=tuple(
                    Part(island=islands[island], shape=shape)
                    for island, shape in zip(chosen.islands, chosen.shapes, strict=True)
                ),
                layers=(transformer_layers(space, role, int(units[s])),),
                recompute=family.recompute[int(variant[s])],
                warmup_depth=min(slots - s + int(extra[s]), space.num_microbatches),
            )
        )
    pipeline = ChosenPipeline(
        stages=tuple(stages),
        num_microbatches=space.num_microbatches,
        schedule=Schedule(name=family.schedule, virtual_stages=family.virtual_stages),
    )
    return ChosenPlan(
        pipelines=(pipeline,), sharding=family.sharding, early_sends=family.early_sends
    )
