"""`hetplan emit` from a plan file to the other tool's file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from emit_cases import JOB, chosen, result_of, two_regions
from emit_cases import MODEL as MODEL_OF_CASES

from evaluation.search.scaling import INSTANCES, instance_inputs
from hetplan.cli.emit import emit
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.emitters.folder import MANIFEST, read_manifest
from hetplan.errors import InputError
from hetplan.job.spec import Pins
from hetplan.model.spec import Architecture, plain_model
from hetplan.plans.build import plan_of
from hetplan.plans.plan import Recompute, RecomputeGranularity
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_plan, save_result
from hetplan.search.search import search

ROOT = Path(__file__).resolve().parents[2]
MODEL = plain_model(
    name="small",
    architecture=Architecture.GPT,
    num_layers=4,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=1024,
    max_sequence_length=4096,
)


def plan_file(folder: Path, *, sharded: bool) -> Path:
    """The best plan of two islands of 8 A100."""
    inputs = instance_inputs(INSTANCES[0], "megatron", 0.05, 30.0)
    kind = next(each for each in load_catalogue() if each.kind == "nvidia-a100-80gb-sxm")
    islands = tuple(replace(island, device=kind) for island in inputs.cluster.islands)
    pin = Pins(
        recompute=False,
        cp=1,
        virtual_stages=1,
        sequence_parallel=False,
        sharded_optimizer=sharded,
        dp=8,
    )
    result = search(
        MODEL,
        replace(inputs.cluster, islands=islands),
        replace(inputs.job, pin=pin),
        FittedPredictor.datasheet_only(),
    )
    path = folder / "plan.json"
    save_result(result, path)
    return path


def test_other_tools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is written for that"):
        emit(tmp_path / "plan.json", target="word", out=tmp_path / "out")


def trainer_plan(folder: Path, **changes: object) -> Path:
    """A hand-made plan of two regions whose hosts have names."""
    path = folder / "plan.json"
    save_result(replace(two_regions(), **changes), path)
    return path


def test_a_folder_is_written_and_its_remarks_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    emit(trainer_plan(tmp_path), target="megatron", out=out)
    said = capsys.readouterr().err
    assert "32 ranks on 4 hosts" in said
    assert "tp 8: all 4 groups lie inside nodes" in said
    assert (out / "start-all.sh").exists()
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.target == "megatron"


def test_the_folder_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    emit(trainer_plan(tmp_path), target="megatron", out=out, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["hosts"], found["agents"]) == (32, 4, 4)
    assert (found["schema"], found["target"]) == ("hetplan.emission/1", "megatron")
    assert sorted(found["files"]) == sorted(
        str(each.relative_to(out))
        for each in out.rglob("*")
        if each.is_file() and each.name != MANIFEST
    )


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
    script = (out / "start-here.sh").read_text()
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


def test_a_missing_option_is_no_fault_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing") as caught:
        emit(trainer_plan(tmp_path), target="megatron", out=tmp_path / "run", data=["x"])
    assert "nearest" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_refused_plan_is_told_where_and_how_to_go_on(tmp_path: Path) -> None:
    plan = trainer_plan(tmp_path)
    document = json.loads(plan.read_text())
    document["plan"]["target"] = document["inputs"]["job"]["target"] = "any"
    stage = document["plan"]["pipelines"][0]["stages"][1]
    stage["recompute"]["granularity"] = "full"
    plan.write_text(json.dumps(document, indent=2))
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"recomputes the same on all stages") as caught:
        emit(plan, target="megatron", out=out)
    first, last = str(caught.value).splitlines()
    assert first.startswith(f"{plan}:")
    assert ": plan.pipelines[0].stages[" in first
    assert f"hetplan emit {plan} --target megatron --out {out} --nearest nearest.json" in last
    assert not out.exists()
    with pytest.raises(InputError) as caught:
        emit(
            plan,
            target="megatron",
            out=out,
            data=["/data/a b", "-c"],
            tokenizer="/tok",
            learning_rate=3e-4,
            steps=7,
            extra=["--log-interval 9"],
            force=True,
        )
    words = shlex.split(str(caught.value).splitlines()[-1].partition("is found by: ")[2])
    assert words[8:] == [
        "nearest.json",
        "--data=/data/a b",
        "--data=-c",
        "--tokenizer=/tok",
        "--steps=7",
        "--learning-rate=0.0003",
        "--extra=--log-interval 9",
        "--force",
    ]


def test_the_nearest_plan_is_searched_written_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of `any` recomputes differently by stage; megatron's does not, and is emitted."""
    result = two_regions()
    job = replace(result.inputs.job, target="any", gap=0.2, pin=Pins(tp=8, cp=1))
    (pipeline,) = result.plan.pipelines
    full = Recompute(granularity=RecomputeGranularity.FULL)
    stages = (replace(pipeline.stages[0], recompute=full), *pipeline.stages[1:])
    path = trainer_plan(
        tmp_path,
        inputs=replace(result.inputs, job=job),
        plan=replace(result.plan, target="any", pipelines=(replace(pipeline, stages=stages),)),
    )
    nearest = tmp_path / "nearest.json"
    out = tmp_path / "run"
    store = tmp_path / "store"
    with pytest.raises(typer.Exit) as ended:
        emit(path, target="megatron", out=out, nearest=nearest, store=[empty_store(store)])
    assert ended.value.exit_code == 2
    assert not out.exists()
    said = capsys.readouterr().err
    assert "target megatron cannot run" in said
    assert "of the refused plan (" in said
    assert "  recompute: full/none -> none" in said
    emit(nearest, target="megatron", out=out)
    assert {replica.tp for replica in load_plan(out / "plan.json").plan.replicas} == {8}


def empty_store(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_nearest_plan_needs_a_place_of_its_own(tmp_path: Path) -> None:
    plan = trainer_plan(tmp_path)
    with pytest.raises(InputError, match="is the plan itself"):
        emit(plan, target="megatron", out=tmp_path / "run", nearest=plan)
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(InputError, match="is no plan"):
        emit(plan, target="megatron", out=tmp_path / "run", nearest=notes)
    with pytest.raises(InputError, match="belong to --nearest"):
        emit(plan, target="megatron", out=tmp_path / "run", predictor=notes)


def test_hosts_and_domains_of_a_later_cluster_file_are_taken(tmp_path: Path) -> None:
    source = (ROOT / "configs/clusters/three-domains.yaml").read_text()
    named = tmp_path / "named.yaml"
    named.write_text(source)
    bare = re.sub(r"^ *node_names:.*\n", "", source[: source.index("\nlaunch:")], flags=re.M)
    (tmp_path / "bare.yaml").write_text(bare + "\n")
    machines = load_cluster(tmp_path / "bare.yaml")
    made = plan_of(MODEL_OF_CASES, machines, JOB, chosen(("h100", 4), ("a100", 8), tp=8))
    path = tmp_path / "plan.json"
    save_result(result_of(machines, made), path)
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"islands\[0\].node_names: .*--cluster FILE"):
        emit(path, target="megatron", out=out)
    emit(path, target="megatron", out=out, cluster=named)
    assert "\thpc01\t10.1.0.11\tnorth-slurm\t" in (out / "agents.tsv").read_text()
    named.write_text(
        source.replace("nodes: 2", "nodes: 3")
        .replace("[01-02]", "[01-03]")
        .replace("[1-2]", "[1-3]")
        .replace("[11-12]", "[11-13]")
        .replace("[21-22]", "[21-23]")
        .replace("[oak, pine]", "[oak, pine, fir]")
    )
    with pytest.raises(InputError, match="island h100 has nodes 3, the plan's cluster 2"):
        emit(path, target="megatron", out=tmp_path / "other", cluster=named)
    other = ROOT / "configs/clusters/two-regions.yaml"
    with pytest.raises(InputError, match="was made for another cluster"):
        emit(path, target="megatron", out=tmp_path / "other", cluster=other)


def test_a_folder_that_is_there_is_kept_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = trainer_plan(tmp_path), tmp_path / "run"
    emit(plan, target="megatron", out=out)
    (out / "README.md").write_text("my own words")
    with pytest.raises(InputError, match="is not empty"):
        emit(plan, target="megatron", out=out)
    assert (out / "README.md").read_text() == "my own words"
    emit(plan, target="megatron", out=out, force=True)
    assert "replaced, though changed by hand: README.md" in capsys.readouterr().err


def test_what_it_says_to_run_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = trainer_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("-run", "a $(touch pwned) run"):
        emit(plan, target="megatron", out=Path(name))
        last = capsys.readouterr().err.splitlines()[-1]
        command = last.partition("it starts with: ")[2]
        subprocess.run(["bash", "-c", f"{command} --help"], check=True, capture_output=True)
    assert not (tmp_path / "pwned").exists()
