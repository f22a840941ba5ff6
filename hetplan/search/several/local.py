"""A whole plan changed a little at a time: layers between stages, what stages recompute, shares.

Every change is priced whole (`hetplan.cost.step_model.pricer`), with the microbatches dealt out
anew, because reductions between pipelines of unlike cuts are priced nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage
from hetplan.plans.plan import RecomputeGranularity
from hetplan.search.several.assembling import Assembler, Whole


def improved(start: Whole, assembler: Assembler, *, budget: int) -> Whole:
    """The best that first improvements reach within so many prices."""
    best, spent, again = start, 0, True
    while again:
        again = False
        for chosen in _neighbours(best.chosen, assembler):
            if spent >= budget:
                return best
            spent += 1
            dealt = assembler.balanced(chosen)
            whole = None if dealt is None else assembler.whole(dealt)
            if whole is not None and whole.seconds < best.seconds * (1 - 1e-9):
                best, again = whole, True
                break
    return best


def _neighbours(chosen: ChosenPlan, assembler: Assembler) -> Iterator[ChosenPlan]:
    for p, pipeline in enumerate(chosen.pipelines):
        for changed in (*_moved_layers(pipeline, assembler), *_other_recompute(pipeline)):
            yield replace(
                chosen,
                pipelines=(*chosen.pipelines[:p], changed, *chosen.pipelines[p + 1 :]),
            )


def _moved_layers(pipeline: ChosenPipeline, assembler: Assembler) -> Iterator[ChosenPipeline]:
    """One layer unit less on the slowest stages, one more elsewhere."""
    step = assembler.layers_per_unit
    count = len(pipeline.stages)
    for distance in range(1, count):
        for source in range(count):
            for target in (source - distance, source + distance):
                if 0 <= target < count and pipeline.stages[source].layers[0] > step:
                    layers = [stage.layers[0] for stage in pipeline.stages]
                    layers[source] -= step
                    layers[target] += step
                    yield _with_layers(pipeline, layers)


def _with_layers(pipeline: ChosenPipeline, layers: list[int]) -> ChosenPipeline:
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, layers=(held,))
            for stage, held in zip(pipeline.stages, layers, strict=True)
        ),
    )


def _other_recompute(pipeline: ChosenPipeline) -> Iterator[ChosenPipeline]:
    for s, stage in enumerate(pipeline.stages):
        if stage.recompute is not RecomputeGranularity.NONE:
            yield _with_stage(pipeline, s, replace(stage, recompute=RecomputeGranularity.NONE))


def _with_stage(pipeline: ChosenPipeline, at: int, stage: ChosenStage) -> ChosenPipeline:
    return replace(pipeline, stages=(*pipeline.stages[:at], stage, *pipeline.stages[at + 1 :]))
