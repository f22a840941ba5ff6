"""What is emitted for FlagScale puts every rank where the plan has it, as FlagScale reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flagscale_reader import RefusedError, expanded, hosts, places, read, train_words, validate
from trainer_models import MODEL
from trainer_plans import (
    A100,
    FULL,
    JOB,
    MI300,
    NO_OPTIONS,
    cluster,
    flagscale,
    island,
    made,
    one_pipeline,
    random_results,
    ranks_of,
    with_plan,
)
from trainer_plans import flagscale_stage as stage

from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenStage
from hetplan.plans.formats import needs_meshes
from hetplan.plans.plan import Sharding
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout, libraries
from hetplan.search.result import SearchResult
from hetplan.trainers.flagscale.write import TRAINER


def planned(
    *stages: ChosenStage,
    kinds: tuple[str, str] = (A100, MI300),
    model: ModelSpec = MODEL,
    sharding: Sharding = Sharding.NONE,
    **changes: object,
) -> tuple[SearchResult, RankLayout]:
    """Stages on islands a and b of these kinds."""
    machines = cluster(
        *(island(name, nodes=4, kind=kind) for name, kind in zip("ab", kinds, strict=True))
    )
    chosen = one_pipeline(*stages, microbatches=16, sharding=sharding)
    result = made(machines, chosen, model, replace(JOB, target="flagscale"), **changes)
    return result, ranks_of(result)


def launched(
    plan: tuple[SearchResult, RankLayout], options: EmissionOptions = NO_OPTIONS
) -> TrainerLaunch:
    assert TRAINER.faults(*plan, options) == ()
    return TRAINER.launch(*plan, options)


def text(launch: TrainerLaunch, path: str) -> str:
    return next(file.text for file in launch.files if file.path == path)


def words(launch: TrainerLaunch) -> list[str]:
    return [word for argument in launch.arguments for word in argument]


def faults(
    plan: tuple[SearchResult, RankLayout], options: EmissionOptions = NO_OPTIONS
) -> list[str]:
    return [f"{each.field}: {each.message}" for each in TRAINER.faults(*plan, options)]


def agent_types(launch: TrainerLaunch, sheet: RankLayout) -> list[str]:
    """Type of every rank as start-here.sh says it."""
    given = [
        dict(arguments)["--hetero-current-device-type"] for arguments in launch.agent_arguments
    ]
    return [
        name for agent, name in zip(sheet.agents, given, strict=True) for _ in agent.local_devices
    ]


def check_ranks(plan: tuple[SearchResult, RankLayout], launch: TrainerLaunch) -> None:
    found, sheet = plan
    stages = found.plan.pipelines[0].stages
    rows = [*rank_rows(found.plan, found.inputs.cluster)]
    read_places = places(words(launch), agent_types(launch, sheet))
    assert len(rows) == len(read_places)
    for row, place in zip(rows, read_places, strict=True):
        replica = stages[row.stage].replicas[0]
        assert (place.stage, place.dp, place.tp) == (row.stage, row.dp, row.tp)
        assert place.microbatch_size == replica.microbatch_size
        assert place.sequence_parallel == replica.sequence_parallel
        held = [chunk.stop - chunk.start for chunk in stages[row.stage].chunks]
        ends = (row.stage == 0) + (row.stage == len(stages) - 1)
        assert place.layers == sum(held) - ends


# ---- whole plans


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (30, 80, 130))]
)
def test_random_plans_are_mapped_by_flagscale_as_planned(first: int) -> None:
    hetero = 0
    for found in random_results(flagscale, seed=first, count=50 if first else 15):
        sheet = ranks_of(found)
        launch = launched((found, sheet))
        assert words(launch) == train_words(text(launch, "flagscale.yaml"))
        args = read(words(launch))
        several = len(libraries(sheet.agents)) > 1
        assert needs_meshes(found.plan, several_libraries=several) is args.enable_hetero
        assert args.global_batch_size == JOB.global_batch_size
        if not args.enable_hetero:
            continue
        hetero += 1
        check_ranks((found, sheet), launch)
        check_recompute(found, launch)
        lines = hosts(text(launch, "hostfile")) if "hostfile" in files(launch) else []
        if lines:
            by_host = [name or "" for _, slots, name in lines for _ in range(slots)]
            assert by_host == agent_types(launch, sheet)
            assert [name for name, _, _ in lines] == [each.host.address for each in sheet.agents]
    assert hetero > 7


def files(launch: TrainerLaunch) -> list[str]:
    return [file.path for file in launch.files]


def check_recompute(found: SearchResult, launch: TrainerLaunch) -> None:
    args = read(words(launch))
    pipeline = found.plan.pipelines[0]
    asked = [each.recompute == FULL for each in pipeline.stages]
    rows = args.recompute_granularity_per_stage_micro_batch
    if not any(asked):
        assert args.recompute_granularity is None
        assert rows is None
    elif all(asked):
        assert (args.recompute_granularity, rows) == ("full", None)
    else:
        assert args.recompute_granularity == "full"
        count = pipeline.num_microbatches
        assert expanded(rows) == [[int(each)] * count for each in asked]
        layers = expanded(args.recompute_num_layers_per_stage_micro_batch)
        assert layers == [[1] * count for _ in asked]


# ---- files


# ---- what is refused


def test_broken_meshes_are_refused_here_and_there() -> None:
    plan = planned(stage("a", 7, tp=2, dp=4), stage("b", 5, tp=8, dp=1))
    good, sheet = plan
    (pipeline,) = good.plan.pipelines
    first, second = pipeline.stages
    second = replace(second, replicas=(replace(second.replicas[0], microbatch_size=3),))
    bad = with_plan(good, pipelines=(replace(pipeline, stages=(first, second)),))
    assert any("microbatch size 3" in each for each in faults((bad, sheet)))
    launch = launched((good, sheet))
    given = words(launch)
    types = agent_types(launch, sheet)
    for flag, wrong in (
        ("--hetero-pipeline-layer-split", ["7", "4"]),
        ("--hetero-process-meshes", ["2", "1", "1", "4", "1", "8", "1", "1", "3", "1"]),
        ("--hetero-device-types", [A100]),
    ):
        at = given.index(flag) + 1
        stop = at + next(n for n, word in enumerate(given[at:]) if word.startswith("--"))
        with pytest.raises(RefusedError):
            validate(read([*given[:at], *wrong, *given[stop:]]), len(types))


def test_what_flagscale_would_train_otherwise_is_refused() -> None:

    def said(*shapes: tuple[int, int, bool], **changes: object) -> str:
        stages = (
            stage(name, layers, tp=tp, dp=dp, sequence_parallel=parallel)
            for name, layers, (tp, dp, parallel) in zip("ab", (7, 5), shapes, strict=True)
        )
        return " ".join(faults(planned(*stages, **changes)))  # type: ignore[arg-type]

    assert said((2, 1, False), (2, 1, False)) == ""
    assert "along the sequence" in said((2, 1, False), (4, 1, False))
    assert "one switch" in said((2, 1, True), (2, 1, False))
    halves = {"sharding": Sharding.OPTIMIZER, "optimizer_shards": 2}
    assert "shards stage 0 over 2" in said((1, 4, False), (2, 4, True), **halves)


def test_texts_that_its_script_would_change_are_refused() -> None:
    plan = planned(stage("a", 7, tp=1, dp=1), stage("b", 5, tp=1, dp=1))
    options = EmissionOptions(
        data=("/data/$(reboot)",),
        tokenizer='/a"b',
        learning_rate=1e-4,
        save="/save; reboot",
        extra_arguments=("word", "--x", "a`b"),
    )
    found_faults = faults(plan, options)
    for field in (
        "--data",
        "--tokenizer",
        "--save",
        "--extra: begins",
        "--extra: 'a",
    ):
        assert any(each.startswith(field) for each in found_faults), (field, found_faults)
