"""What is emitted for FlagScale puts every rank where the plan has it, as FlagScale reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from emit_cases import MODEL, TIED
from flagscale_plans import (
    A100,
    FLAGSCALE_JOB,
    FULL,
    H100,
    MI300,
    legal,
    machines,
    planned,
    random_result,
    stage,
)
from flagscale_reader import RefusedError, expanded, hosts, places, read, train_words, validate

from hetplan.cluster.launch_domains import Scheduler
from hetplan.plans.plan import Sharding
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers.flagscale.write import TRAINER, runner_obstacles

PLAIN = EmissionOptions()


def launched(
    made: tuple[SearchResult, RankLayout], options: EmissionOptions = PLAIN
) -> TrainerLaunch:
    found, sheet = made
    assert TRAINER.faults(found, sheet, options) == ()
    return TRAINER.launch(found, sheet, options)


def text(launch: TrainerLaunch, path: str) -> str:
    return next(file.text for file in launch.files if file.path == path)


def words(launch: TrainerLaunch) -> list[str]:
    return [word for argument in launch.arguments for word in argument]


def faults(made: tuple[SearchResult, RankLayout], options: EmissionOptions = PLAIN) -> list[str]:
    return [f"{each.field}: {each.message}" for each in TRAINER.faults(*made, options)]


def agent_types(launch: TrainerLaunch, sheet: RankLayout) -> list[str]:
    """Type of every rank as start-here.sh says it."""
    given = [
        dict(arguments)["--hetero-current-device-type"] for arguments in launch.agent_arguments
    ]
    return [
        name for agent, name in zip(sheet.agents, given, strict=True) for _ in agent.local_devices
    ]


def check_ranks(made: tuple[SearchResult, RankLayout], launch: TrainerLaunch) -> None:
    found, sheet = made
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
    for seed in range(first, first + (50 if first else 15)):
        made = random_result(seed)
        found, sheet = made
        launch = launched(made)
        assert words(launch) == train_words(text(launch, "flagscale.yaml"))
        args = read(words(launch))
        assert args.global_batch_size == FLAGSCALE_JOB.global_batch_size
        if not args.enable_hetero:
            continue
        hetero += 1
        check_ranks(made, launch)
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
    asked = [each.recompute.granularity is FULL for each in pipeline.stages]
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


def test_one_shape_needs_no_meshes() -> None:
    found = machines(A100, H100)
    plan = planned(found, stage("a", 7, tp=8, dp=1), stage("b", 5, tp=8, dp=1))
    launch = launched(legal(found, plan))
    assert "--enable-hetero" not in words(launch)
    assert ("--pipeline-model-parallel-layout", "Et*7|t*5L") in launch.arguments
    assert ("--ckpt-format", "torch_dist") in launch.arguments
    # Its own runner always gives --save, which asks for an interval.
    assert ("--save-interval", "50") in launch.arguments
    assert launch.agent_arguments == ()
    assert [kind for _, _, kind in hosts(text(launch, "hostfile"))] == [None, None]


def test_vendors_with_libraries_of_their_own_talk_through_host_memory() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=8, dp=1), stage("b", 5, tp=8, dp=1))
    launch = launched(legal(found, plan))
    args = read(words(launch))
    assert args.enable_hetero
    assert args.hetero_use_cpu_communication
    assert args.hetero_device_types == [A100, MI300]
    assert ("--ckpt-format", "torch") in launch.arguments
    assert any("cannot be resharded" in remark for remark in launch.remarks)


def test_a_tied_matrix_is_reduced_in_parts_where_dp_differs() -> None:
    found = machines(A100, MI300)
    plan = planned(
        found,
        stage("a", 7, tp=2, dp=2),
        stage("b", 5, tp=2, dp=4),
        model=TIED,
        sharding=Sharding.OPTIMIZER,
    )
    made = legal(found, plan, TIED)
    launch = launched(made)
    args = read(words(launch))
    assert args.use_partial_reduce_for_shared_embedding
    assert args.use_distributed_optimizer
    check_ranks(made, launch)
    odd = replace(made[0], plan=replace(plan, padded_vocab_size=plan.padded_vocab_size + 2))
    assert any("does not divide" in each for each in faults((odd, made[1])))


def test_both_ends_pad_the_vocabulary_alike() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=1, dp=4), stage("b", 5, tp=8, dp=1))
    args = read(words(launched(legal(found, plan))))
    for tp in (1, 8):
        unit = args.make_vocab_size_divisible_by * tp
        assert -(-MODEL.vocab_size // unit) * unit == plan.padded_vocab_size


# ---- files


def test_the_experiment_says_hosts_and_environment() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=8, dp=2), stage("b", 5, tp=4, dp=1))
    launch = launched(legal(found, plan))
    experiment = yaml.safe_load(text(launch, "flagscale.yaml"))
    runner = experiment["experiment"]["runner"]
    assert (runner["rdzv_backend"], runner["master_addr"]) == ("static", "a0000")
    nodes = experiment["experiment"]["envs"]["node_specific"]
    assert nodes["a0000"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert nodes["b0000"]["HIP_VISIBLE_DEVICES"] == "0,1,2,3"
    assert hosts(text(launch, "hostfile")) == [
        ("a0000", 8, A100),
        ("a0001", 8, A100),
        ("b0000", 4, MI300),
    ]
    assert launch.own_runner[:2] == ("env", "HETPLAN_FOLDER={folder}")
    assert experiment["experiment"]["runner"]["hostfile"] == "${oc.env:HETPLAN_FOLDER}/hostfile"
    assert dict(launch.environment) == {"PYTHONPATH": "third_party/Megatron-LM:."}


# ---- what is refused


def test_broken_meshes_are_refused_here_and_there() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=2, dp=4), stage("b", 5, tp=8, dp=1))
    good, sheet = legal(found, plan)
    pipeline = plan.pipelines[0]
    first, second = pipeline.stages
    bigger = replace(second.replicas[0], microbatch_size=3)
    bad = replace(
        good,
        plan=replace(
            plan,
            pipelines=(replace(pipeline, stages=(first, replace(second, replicas=(bigger,)))),),
        ),
    )
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
    found = machines(A100, MI300)

    def said(*shapes: tuple[int, int, bool], sharding: Sharding = Sharding.NONE) -> str:
        (tp, dp, parallel), (tp2, dp2, parallel2) = shapes
        plan = planned(
            found,
            stage("a", 7, tp=tp, dp=dp, sequence_parallel=parallel),
            stage("b", 5, tp=tp2, dp=dp2, sequence_parallel=parallel2),
            sharding=sharding,
        )
        if sharding is Sharding.OPTIMIZER:
            plan = replace(plan, optimizer_shards=2)
        return " ".join(faults(legal(found, plan)))

    assert said((2, 1, False), (2, 1, False)) == ""
    assert "along the sequence" in said((2, 1, False), (4, 1, False))
    assert "one switch" in said((2, 1, True), (2, 1, False))
    assert "shards stage 0 over 2" in said((1, 4, False), (2, 4, True), sharding=Sharding.OPTIMIZER)


def test_texts_that_its_script_would_change_are_refused() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=1, dp=1), stage("b", 5, tp=1, dp=1))
    made = legal(found, plan)
    options = EmissionOptions(
        data=("/data/$(reboot)",),
        tokenizer='/a"b',
        learning_rate=1e-4,
        save="/save; reboot",
        extra_arguments=("word", "--x", "a`b"),
    )
    found_faults = faults(made, options)
    for field in (
        "--data",
        "--tokenizer",
        "--save",
        "--extra: begins",
        "--extra: 'a",
    ):
        assert any(each.startswith(field) for each in found_faults), (field, found_faults)


def test_what_its_own_runner_cannot_start_is_said() -> None:
    found = machines(A100, MI300)
    plan = planned(found, stage("a", 7, tp=8, dp=2), stage("b", 5, tp=8, dp=1))
    made, sheet = legal(found, plan)
    first, *rest = sheet.agents
    domain = first.host.domain

    def remarks(**changes: object) -> str:
        host = replace(first.host, domain=replace(domain, **changes))  # type: ignore[arg-type]
        other = replace(sheet, agents=(replace(first, host=host), *rest))
        launch = launched((made, other))
        assert launch.own_runner == ()
        return " ".join(launch.remarks)

    assert "started by slurm" in remarks(scheduler=Scheduler.SLURM)
    assert "ssh ports of their own" in remarks(ssh_port=2222)
    spaced = [(("NAME", "a b"),)] * len(sheet.agents)
    assert any("would have to quote" in each for each in runner_obstacles(sheet, spaced))
    twice = replace(
        sheet,
        agents=(
            replace(first, local_devices=first.local_devices[:4]),
            replace(first, node_rank=1, first_rank=4, local_devices=first.local_devices[4:]),
            *(replace(each, node_rank=each.node_rank + 1) for each in rest),
        ),
    )
    launch = launched((made, twice))
    assert "hostfile" not in files(launch)
    assert "runs several agents" in " ".join(launch.remarks)
    check_ranks((made, twice), launch)
