"""Megatron-core's own layout parser, configuration, rank generator and microbatch calculator make
of what is emitted exactly the plan; broken plans are refused on both sides.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from megatron_reader import MegatronRun, read_run
from trainer_plans import launched, megatron, outermost_results, random_results, ranks_of

from hetplan.model.spec import LayerKind
from hetplan.plans.check import check_plan
from hetplan.plans.plan import LayerRange, Plan, Stage
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import RankLayout, rank_layout
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.megatron.mindspeed import TRAINER as MINDSPEED
from hetplan.trainers.megatron.parallel import degrees_of
from hetplan.trainers.megatron.write import TRAINER

REFUSED = 4
"""Of every way to break a plan, so many must be tried."""


def emitted(result: SearchResult, trainer: Trainer) -> tuple[RankLayout, MegatronRun]:
    """The rank layout, and what Megatron-core makes of the arguments on as many ranks."""
    sheet = ranks_of(result, trainer)
    added = 1 if trainer.name == "mindspeed" else 0
    arguments = launched(result, trainer=trainer).arguments
    return sheet, read_run(arguments, sheet.world_size, added_tokens=added)


def check_agreement(result: SearchResult, trainer: Trainer = TRAINER) -> RankLayout:
    """Every rank has the plan's place, layers and device."""
    plan, model = result.plan, result.inputs.model
    sheet, run = emitted(result, trainer)
    pipeline = plan.pipelines[0]
    assert run.num_microbatches == pipeline.num_microbatches
    assert run.virtual_stages == pipeline.schedule.virtual_stages
    assert run.padded_vocab_size == plan.padded_vocab_size
    planned = {(row.node_name, row.local): row for row in rank_rows(plan, result.inputs.cluster)}
    devices = [(agent.host.name, local) for agent in sheet.agents for local in agent.local_devices]
    assert len(set(devices)) == len(planned) == len(run.ranks)
    kinds = model.layers
    for device, rank in zip(devices, run.ranks, strict=True):
        row = planned[device]
        assert (rank.stage, rank.tp, rank.cp, rank.dp) == (row.stage, row.tp, row.cp, row.dp)
        if run.arguments.num_experts:
            assert (rank.ep, rank.etp) == (row.ep, row.etp)
        chunks = pipeline.stages[row.stage].chunks
        assert rank.layers == tuple(
            tuple(at - 1 for at in range(c.start, c.stop) if kinds[at] is LayerKind.TRANSFORMER)
            for c in chunks
        )
        assert rank.embedding == (chunks[0].start == 0)
        assert rank.head == (chunks[-1].stop == len(kinds))
        assert set(rank.mtp) == {0}
    return sheet


@pytest.mark.parametrize("count", [60, pytest.param(320, marks=pytest.mark.slow)])
def test_megatron_makes_of_random_plans_what_they_say(count: int) -> None:
    seen: Counter[str] = Counter()
    for result in random_results(megatron, seed=2, count=count):
        check_agreement(result)
        degrees = degrees_of(result.plan)
        stages = result.plan.pipelines[0].stages
        layers = {sum(c.stop - c.start for c in stage.chunks) for stage in stages}
        seen["all"] += 1
        seen["tp"] += degrees.tp > 1
        seen["cp"] += degrees.cp > 1
        seen["dp"] += degrees.dp > 1
        seen["ep"] += degrees.ep > 1
        seen["virtual stages"] += degrees.virtual_stages > 1
        seen["uneven"] += len(layers) > 1
        seen["several islands"] += any(len(stage.replicas) > 1 for stage in stages)
        seen[stages[0].recompute.granularity] += 1
    assert seen["all"] == count
    # Nothing is tested by a draw that never comes.
    assert min(seen.values()) >= count // 40, seen


def test_the_other_numbering_agrees_too() -> None:
    # Ascend devices may only be listed in ascending order, so that other orders cost agents.
    sheets = [check_agreement(result, MINDSPEED) for result in outermost_results()]
    assert len(sheets) == 14
    assert all(sheet.data_outermost for sheet in sheets)


# ---- broken plans


def _with_stages(plan: Plan, *stages: Stage) -> Plan:
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))


def _change_chunk(result: SearchResult, stage: int, chunk: int, change: LayerRange) -> SearchResult:
    stages = list(result.plan.pipelines[0].stages)
    chunks = list(stages[stage].chunks)
    chunks[chunk] = change
    stages[stage] = replace(stages[stage], chunks=tuple(chunks))
    return replace(result, plan=_with_stages(result.plan, *stages))


def lost_layer(result: SearchResult) -> SearchResult | None:
    """The first chunk ends a layer early."""
    if degrees_of(result.plan).pp == 1:
        return None
    first = result.plan.pipelines[0].stages[0].chunks[0]
    return _change_chunk(result, 0, 0, replace(first, stop=first.stop - 1))


def odd_batch(result: SearchResult) -> SearchResult | None:
    """One sequence too many for the data-parallel ranks."""
    degrees = degrees_of(result.plan)
    if degrees.dp * degrees.microbatch_size == 1:
        return None
    job = replace(result.inputs.job, global_batch_size=result.inputs.job.global_batch_size + 1)
    return replace(result, inputs=replace(result.inputs, job=job))


def wide_tp(result: SearchResult) -> SearchResult | None:
    """tp 3 times as large, on as many more devices: 32 heads cannot be cut so."""
    stages = []
    for stage in result.plan.pipelines[0].stages:
        replicas = tuple(replace(each, tp=3 * each.tp) for each in stage.replicas)
        if any(each.num_devices % (each.tp * each.cp) for each in replicas):
            return None
        stages.append(replace(stage, replicas=replicas))
    return replace(result, plan=_with_stages(result.plan, *stages))


BREAKS = (lost_layer, odd_batch, wide_tp)


def broken(change: Callable[[SearchResult], SearchResult | None]) -> Iterator[SearchResult]:
    for result in random_results(megatron, seed=11, count=10_000):
        found = change(result)
        if found is not None:
            yield found


def test_broken_plans_are_refused_by_both() -> None:
    for change in BREAKS:
        for result in itertools.islice(broken(change), REFUSED):
            plan, inputs = result.plan, result.inputs
            assert check_plan(plan, inputs.model, inputs.cluster, inputs.job), change.__name__
            sheet = rank_layout(plan, inputs.cluster)
            launch = TRAINER.launch(result, sheet, EmissionOptions())
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                read_run(launch.arguments, sheet.world_size)
