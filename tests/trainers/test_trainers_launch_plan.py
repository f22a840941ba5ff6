"""Launches as plans on a cluster: which device each rank is, and what plans cannot have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launches_handwritten import EIGHT_NODES, EXPERIMENT, GPT3, HETERO, HOSTS, LLAMA, MIXTRAL

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Objective, Optimizer, Precision
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import expand
from hetplan.plans.ranks import rank_rows
from hetplan.trainers.flagscale.read import hosts_of_file
from hetplan.trainers.import_launch import job_text, model_text
from hetplan.trainers.launch_plan import PlannedLaunch, launch_plan
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import read_launch

FAST = Link(
    bandwidth_bytes_per_second=3e11, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
NEAR = replace(FAST, bandwidth_bytes_per_second=2.5e10)
STAGED = replace(NEAR, transport=Transport.HOST_STAGED)


def island(
    name: str, nodes: int, *, kind: str = "nvidia-a100-80gb-sxm", per_node: int = 8, out: int = 0
) -> Island:
    device = next(each for each in load_catalogue() if each.kind == kind)
    return Island(
        name=name,
        region="here",
        device=device,
        nodes=nodes,
        devices_per_node=per_node,
        intra_node=FAST,
        inter_node=NEAR,
        memory_bytes=8e10,
        nodes_out=tuple(range(out)),
        node_names=tuple(f"{name}-{at}" for at in range(nodes)),
    )


def cluster(*islands: Island, domains: tuple[LaunchDomain, ...] = ()) -> Cluster:
    return Cluster(name="test", islands=islands, within_region=STAGED, launch_domains=domains)


def imported(
    folder: Path,
    text: str,
    where: Cluster,
    *given: tuple[str, str],
    trainer: str = "megatron",
    name: str = "run.sh",
    hosts: str = "",
    model: ModelSpec | None = None,
    **more: object,
) -> PlannedLaunch:
    path = folder / name
    path.write_text(text)
    rows = ()
    if hosts:
        (folder / "given-hosts").write_text(hosts)
        rows = hosts_of_file(folder / "given-hosts")
    read = read_launch(path, trainer, given, rows)
    if model is None:
        model = launch_model(read, "model")
    return launch_plan(read, model, where, **more)  # type: ignore[arg-type]


def devices(launch: PlannedLaunch) -> list[list[int]]:
    """Of every stage, in the order of its ranks."""
    return [
        [device for replica in stage.replicas for device in expand(replica.devices)]
        for stage in launch.plan.pipelines[0].stages
    ]


def plain(folder: Path, where: Cluster, flags: str, ranks: int, hosts: str = "") -> PlannedLaunch:
    """Eight small layers."""
    text = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 "
        "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --bf16 "
    )
    given = ("WORLD_SIZE", str(ranks))
    return imported(folder, text + flags, where, given, name="a.txt", hosts=hosts)


def test_hosts_are_found_by_name_and_by_address(tmp_path: Path) -> None:
    domain = LaunchDomain(name="d", islands=("a",), addresses=(("a-2", "10.0.0.2"),))
    where = cluster(island("a", 3), domains=(domain,))
    hosts = "10.0.0.2 slots=4\na-0 slots=4\n"
    found = plain(tmp_path, where, "--pipeline-model-parallel-size 2", 8, hosts)
    assert devices(found) == [[16, 17, 18, 19], [0, 1, 2, 3]]
    rows = [*rank_rows(found.plan, where)]
    assert [row.node_name for row in rows[::4]] == ["a-2", "a-0"]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("b-0 slots=8\n", "'b-0' is no node of cluster test"),
        ("a-0 slots=16\n", "has 8 devices in the cluster file"),
    ],
)
def test_hosts_that_are_not_there_have_their_line(tmp_path: Path, hosts: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        plain(tmp_path, cluster(island("a", 2)), "", 8, "# hosts\n" + hosts)
    assert caught.value.faults[0].line == 2


def test_without_hosts_usable_nodes_are_taken_in_order(tmp_path: Path) -> None:
    where = cluster(island("a", 2, out=1), island("b", 2))
    found = plain(tmp_path, where, "--pipeline-model-parallel-size 2", 16)
    assert devices(found) == [[*range(8, 16)], [*range(16, 24)]]
    text = found.facts.text
    model = launch_model(text, "model")
    chosen = launch_plan(text, model, where, islands=("b",))
    assert devices(chosen) == [[*range(16, 24)], [*range(24, 32)]]
    with pytest.raises(InputError, match="room for 24"):
        plain(tmp_path, where, "", 32)
    with pytest.raises(InputError, match="no island is named c"):
        launch_plan(text, model, where, islands=("c",))


def test_a_stage_on_two_islands_has_an_entry_for_each(tmp_path: Path) -> None:
    found = plain(tmp_path, cluster(island("a", 1), island("b", 1)), "", 16)
    (stage,) = found.plan.pipelines[0].stages
    assert [replica.dp for replica in stage.replicas] == [8, 8]
    with pytest.raises(InputError, match="lies on islands a and b"):
        plain(
            tmp_path,
            cluster(island("a", 1, per_node=4), island("b", 1, per_node=4)),
            "--context-parallel-size 8",
            8,
        )


def test_meshes_go_to_the_hosts_of_their_types(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "hetero.yaml").write_text(HETERO)
    (tmp_path / "hosts").write_text(HOSTS)
    where = cluster(
        island("h100", 2, kind="nvidia-h100-80gb-sxm"),
        island("a100", 1, kind="nvidia-a100-80gb-sxm"),
    )
    found = imported(tmp_path, EXPERIMENT, where, trainer="flagscale", name="e.yaml")
    # The hostfile names the H100 first; the first mesh is of the A100.
    assert devices(found) == [[*range(16, 24)], [*range(8)], [*range(8, 16)]]
    stages = found.plan.pipelines[0].stages
    assert [
        (s.replicas[0].tp, s.replicas[0].dp, s.replicas[0].microbatch_size) for s in stages
    ] == [
        (2, 4, 1),
        (4, 2, 2),
        (4, 2, 2),
    ]
    assert [stage.recompute.granularity.value for stage in stages] == ["full", "none", "none"]
    assert found.plan.optimizer_shards == 4
    (remark,) = found.remarks
    assert "pads the vocabulary to 32000" in remark
    # Without a hostfile islands of those names are taken.
    (tmp_path / "hosts").unlink()
    renamed = cluster(
        replace(where.islands[0], name="H100"), replace(where.islands[1], name="A100")
    )
    again = imported(tmp_path, EXPERIMENT, renamed, trainer="flagscale", name="e.yaml")
    assert devices(again) == devices(found)


# ---- what does not agree


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("Et*15|t*17L", "Et*15|t*15L", "30 layers are on its 2 stages, the model has 32", 16),
        ("--global-batch-size 128", "--global-batch-size 127", "is no multiple of dp 2", 13),
        ("--num-layers 32", "--num-layers 30", "30, and the model model has 32", 7),
        ("--untie-embeddings-and-output-weights", "", "the launch ties embedding and head", 0),
    ],
)
def test_what_contradicts_the_model_has_its_line(
    tmp_path: Path, old: str, new: str, message: str, line: int
) -> None:
    where = cluster(island("a", 1))
    model = launch_model(imported(tmp_path, LLAMA, where).facts.text, "model")
    with pytest.raises(InputError) as caught:
        imported(tmp_path, LLAMA.replace(old, new), where, model=model)
    found = [each for each in caught.value.faults if message in each.message]
    assert [each.line for each in found] == [line]


def test_a_plan_that_the_target_has_not_can_be_priced_for_any(tmp_path: Path) -> None:
    where = cluster(island("a", 1), island("b", 1, kind="nvidia-h100-80gb-sxm"))
    with pytest.raises(InputError, match="--target any prices it all the same"):
        plain(tmp_path, where, "", 16)
    text = read_launch(tmp_path / "a.txt", "megatron", (("WORLD_SIZE", "16"),))
    found = launch_plan(text, launch_model(text, "m"), where, target="any")
    assert (found.plan.target, found.job.target) == ("any", "any")
    assert len(found.plan.pipelines[0].stages[0].replicas) == 2


def test_the_job_gives_what_the_launch_does_not_say(tmp_path: Path) -> None:
    job = Job(
        name="ours",
        global_batch_size=64,
        sequence_length=8192,
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target="megatron",
        objective=Objective.COST_PER_TOKEN,
        memory_reserve_fraction=0.2,
    )
    found = imported(tmp_path, LLAMA, cluster(island("a", 1)), job=job)
    assert found.job == replace(job, global_batch_size=128)
    assert "global_batch_size of the job, 64, is not the launch's: 128 is priced" in found.remarks


# ---- drafts


def test_drafts_are_read_back(tmp_path: Path) -> None:
    for text, given in ((GPT3, ()), (LLAMA, ()), (MIXTRAL, EIGHT_NODES)):
        found = imported(tmp_path, text, cluster(island("a", 128)), *given)
        model = launch_model(found.facts.text, "a-model")
        (tmp_path / "m.yaml").write_text(model_text(model))
        (tmp_path / "j.yaml").write_text(job_text(found.job))
        assert load_model(tmp_path / "m.yaml") == model
        assert load_job(tmp_path / "j.yaml") == found.job


def test_devices_that_a_launch_hides_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "hetero.yaml").write_text(HETERO)
    (tmp_path / "hosts").write_text(HOSTS)
    where = cluster(
        island("h100", 2, kind="nvidia-h100-80gb-sxm"),
        island("a100", 1, kind="nvidia-a100-80gb-sxm"),
    )
    experiment = EXPERIMENT.replace(
        "  envs:\n",
        "  envs:\n    node_specific:\n      a100-0: {CUDA_VISIBLE_DEVICES: '7,6,5,4,3,2,1,0'}\n",
    )
    found = imported(tmp_path, experiment, where, trainer="flagscale", name="e.yaml")
    assert devices(found)[0] == [23, 22, 21, 20, 19, 18, 17, 16]
