"""MindSpeed takes Megatron-LM's layout and values."""

from __future__ import annotations

from dataclasses import replace

from megatron_reader import read_run
from trainer_models import device
from trainer_plans import (
    ASCEND,
    NO_OPTIONS,
    launched,
    megatron,
    messages,
    outermost_results,
    random_results,
    with_job,
    with_plan,
)
from trainer_plans import ranks_of as sheet

from hetplan.job.spec import ProductFormat, TrainerOptions
from hetplan.plans.plan import OverlapSettings
from hetplan.search.result import SearchResult
from hetplan.trainers.megatron.mindspeed import TRAINER as MINDSPEED
from hetplan.trainers.megatron.parallel import degrees_of
from hetplan.trainers.megatron.write import megatron_arguments


def on_ascend(result: SearchResult) -> SearchResult:
    """The same plan on a cluster whose islands all have Ascend devices."""
    cluster = result.inputs.cluster
    islands = tuple(replace(island, device=device(ASCEND)) for island in cluster.islands)
    changed = replace(cluster, islands=islands)
    return replace(result, inputs=replace(result.inputs, cluster=changed))


def test_mindspeed_takes_megatrons_arguments() -> None:
    count = 0
    for result in random_results(megatron, seed=31, count=60):
        ascend = on_ascend(result)
        if MINDSPEED.faults(ascend, sheet(ascend), NO_OPTIONS):
            asked = {entry[0] for entry in megatron_arguments(ascend, sheet(ascend), NO_OPTIONS)}
            later = {"--window-size", "--rope-type", "--moe-shared-expert-gate"} & asked
            assert degrees_of(result.plan).cp > 1 or result.plan.optimizer_shards > 1 or later
            continue
        count += 1
        mine = launched(ascend, trainer=MINDSPEED).arguments
        megatrons = megatron_arguments(ascend, sheet(ascend), NO_OPTIONS)
        own = ("--transformer-impl", "--vocab-size", "--nccl-communicator-config-path")
        theirs = [entry for entry in megatrons if entry[0] not in own]
        assert [each for each in mine if each[0] not in (*own, "--distributed-backend")] == theirs
        run = read_run(mine, sheet(ascend).world_size, added_tokens=1)
        assert run.padded_vocab_size == result.plan.padded_vocab_size
    assert count > 15


def test_mindspeed_refuses_what_its_code_does_not_show() -> None:
    nvidia = next(random_results(megatron, seed=31, count=1))
    assert any("Ascend alone" in message for message in messages(nvidia, trainer=MINDSPEED))
    result = next(outermost_results())
    assert messages(result) != []

    wrong = (
        with_job(result, trainer=TrainerOptions(product_format=ProductFormat.FLOAT8)),
        with_plan(result, overlap=OverlapSettings(tensor_parallel=True)),
    )
    for each in wrong:
        assert any(
            "found in neither MindSpeed's code" in message
            for message in messages(each, trainer=MINDSPEED)
        )
