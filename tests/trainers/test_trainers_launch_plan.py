"""Launches as plans on a cluster: which device each rank is, and what plans cannot have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launches_handwritten import EIGHT_NODES, EXPERIMENT, GPT3, HETERO, HOSTS, LLAMA, MIXTRAL
from trainer_plans import cluster
from trainer_plans import island as plain_island

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import expand
from hetplan.plans.ranks import rank_rows
from hetplan.trainers.flagscale.read import hosts_of_file
from hetplan.trainers.import_launch import job_text, model_text
from hetplan.trainers.launch_plan import PlannedLaunch, launch_plan
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import read_launch


def island(name: str, nodes: int, *, out: int = 0, **more: object) -> Island:
    """Nodes of these names: a-0, a-1, ...; the first `out` are out of use."""
    made = plain_island(name, nodes=nodes, **more)  # type: ignore[arg-type]
    names = tuple(f"{name}-{at}" for at in range(nodes))
    return replace(made, nodes_out=tuple(range(out)), node_names=names)


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
    where = replace(cluster(island("a", 3)), launch_domains=(domain,))
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
            cluster(island("a", 1, devices_per_node=4), island("b", 1, devices_per_node=4)),
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


# ---- drafts


def test_drafts_are_read_back(tmp_path: Path) -> None:
    for text, given in ((GPT3, ()), (LLAMA, ()), (MIXTRAL, EIGHT_NODES)):
        found = imported(tmp_path, text, cluster(island("a", 128)), *given)
        model = launch_model(found.facts.text, "a-model")
        (tmp_path / "m.yaml").write_text(model_text(model))
        (tmp_path / "j.yaml").write_text(job_text(found.job))
        assert load_model(tmp_path / "m.yaml") == model
        assert load_job(tmp_path / "j.yaml") == found.job
