"""`hetplan emit` from a plan file to the other tool's file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_files import write_sealed
from trainer_models import MODEL
from trainer_plans import JOB, chosen, result_of, two_regions

from hetplan.cli.emit import _target_of, emit
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.plans.build import plan_of
from hetplan.search.files import load_legal_plan, save_result

ROOT = Path(__file__).resolve().parents[2]


def trainer_plan(folder: Path, **changes: object) -> Path:
    """A hand-made plan of two regions whose hosts have names."""
    path = folder / "plan.json"
    save_result(replace(two_regions(), **changes), path)
    return path


def test_the_folder_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    emit(trainer_plan(tmp_path), target="megatron", out=out, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["hosts"], found["agents"]) == (32, 4, 4)
    assert (found["schema"], found["target"]) == ("hetplan.emission/1", "megatron")
    assert sorted(found["files"]) == sorted(each.name for each in out.iterdir())


def test_options_reach_the_trainer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    plan = trainer_plan(tmp_path)
    emit(
        plan,
        target="megatron",
        out=out,
        trainer_folder="/opt/Megatron LM",
        data=["/data/a b_text_document"],
        tokenizer="/data/tokenizer",
        learning_rate=3e-4,
        steps=7,
        extra=["--log-throughput --log-interval '9'"],
    )
    script = (out / "launch.sh").read_text()
    for words in (
        "'/opt/Megatron LM'",
        "'/data/a b_text_document'",
        "--train-iters 7",
        "--log-throughput",
        "--log-interval 9",
    ):
        assert words in script
    with pytest.raises(InputError, match=r"--extra: No closing quotation"):
        emit(plan, target="megatron", out=tmp_path / "other", extra=["'"])


def test_a_refused_plan_is_told_where_and_how_to_go_on(tmp_path: Path) -> None:
    plan = trainer_plan(tmp_path)
    document = json.loads(plan.read_text())
    document["plan"]["target"] = document["inputs"]["job"]["target"] = "any"
    stage = document["plan"]["pipelines"][0]["stages"][1]
    stage["recompute"]["granularity"] = "full"
    write_sealed(plan, document)
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"recomputes the same on all stages") as caught:
        emit(plan, target="megatron", out=out)
    first, last = str(caught.value).splitlines()
    assert first.startswith(f"{plan}:")
    assert ": plan.pipelines[0].stages[" in first
    assert "--nearest=nearest.json" in last
    assert not out.exists()


def test_hosts_and_domains_of_a_later_cluster_file_are_taken(tmp_path: Path) -> None:
    source = (ROOT / "configs/clusters/three-domains.yaml").read_text()
    named = tmp_path / "named.yaml"
    named.write_text(source)
    bare = re.sub(r"^ *node_names:.*\n", "", source[: source.index("\nlaunch:")], flags=re.M)
    (tmp_path / "bare.yaml").write_text(bare + "\n")
    machines = load_cluster(tmp_path / "bare.yaml")
    made = plan_of(MODEL, machines, JOB, chosen(("h100", 4), ("a100", 8), tp=8))
    path = tmp_path / "plan.json"
    save_result(result_of(machines, made), path)
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"islands\[0\].node_names: .*--cluster FILE"):
        emit(path, target="megatron", out=out)
    emit(path, target="megatron", out=out, cluster=named)
    assert "hpc01/1" in (out / "launch.sh").read_text()
    assert "--master-addr=10.1.0.11" in (out / "launch.sh").read_text()
    other = ROOT / "configs/clusters/two-regions.yaml"
    with pytest.raises(InputError, match="was made for another cluster"):
        emit(path, target="megatron", out=tmp_path / "other", cluster=other)


def test_the_plans_own_trainer_is_the_default(tmp_path: Path) -> None:
    plan = trainer_plan(tmp_path)
    emit(plan, out=tmp_path / "own")
    emit(plan, target=load_legal_plan(plan).plan.target, out=tmp_path / "named")
    own, named = (
        {each.name: each.read_bytes() for each in (tmp_path / folder).iterdir()}
        for folder in ("own", "named")
    )
    assert own.keys() == named.keys()
    assert any(own.values())


def test_a_plan_of_no_trainer_says_what_starts_it() -> None:
    result = two_regions()
    own = replace(result, plan=replace(result.plan, target="native"))
    with pytest.raises(InputError, match=r"target native: `hetplan launch a.json`.*--target meg"):
        _target_of(own, Path("a.json"))
    assert _target_of(result, Path("a.json")) == "megatron"
