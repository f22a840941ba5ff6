"""What a plan's folder holds, and how a target's refusals are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_models import MODEL, TIED
from trainer_plans import JOB, PLAIN, chosen, cluster, island, result_of, two_regions

import hetplan
from hetplan.errors import Fault, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.plan import Recompute, RecomputeGranularity
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.files import load_plan, result_text, save_result
from hetplan.search.result import SearchResult
from hetplan.trainers.emission import (
    emission_for,
    merged_faults,
    plan_faults,
    refusals,
)

COMMON_FILES = {"README.md", "plan.json", "launch.sh", "check.py"}


def test_the_folder_has_everything_that_every_target_has() -> None:
    result = two_regions(TIED)
    emission = emission_for(result, PLAIN, EmissionOptions())
    files = {each.path: each for each in emission.files}
    assert set(files) == COMMON_FILES | {each.path for each in emission.launch.files}
    assert len(files) == len(emission.files)
    assert files["plan.json"].text == result_text(result)
    assert emission.launch.title == "a plain trainer"
    assert any("tied embedding" in each for each in emission.ranks.remarks)


def test_the_trainer_sees_its_own_target_and_the_folder_the_plan_as_it_was() -> None:
    """The reference trainer's plan, whose vocabulary is padded as megatron's by chance."""
    result = two_regions()
    native = replace(
        result,
        plan=replace(result.plan, target="any"),
        inputs=replace(result.inputs, job=replace(JOB, target="any")),
    )
    seen: list[tuple[str, str]] = []

    def faults(
        result: SearchResult, sheet: RankLayout, options: EmissionOptions
    ) -> tuple[Fault, ...]:
        seen.append((result.plan.target, result.inputs.job.target))
        return ()

    emission = emission_for(native, replace(PLAIN, faults=faults), EmissionOptions())
    assert seen == [("megatron", "megatron")]
    (plan,) = [each.text for each in emission.files if each.path == "plan.json"]
    assert json.loads(plan)["plan"]["target"] == "any"
    (readme,) = [each.text for each in emission.files if each.path == "README.md"]
    assert "was priced for target any" in readme


def differing_recompute(stages: tuple[int, ...]) -> SearchResult:
    machines = cluster(island("a", nodes=4))
    plan = plan_of(MODEL, machines, JOB, chosen(*[("a", 3)] * 4, tp=8))
    (pipeline,) = plan.pipelines
    full = Recompute(granularity=RecomputeGranularity.FULL)
    changed = tuple(
        replace(stage, recompute=full) if s in stages else stage
        for s, stage in enumerate(pipeline.stages)
    )
    plan = replace(plan, pipelines=(replace(pipeline, stages=changed),))
    return replace(result_of(machines, plan), plan=plan)


def test_limits_of_the_target_come_first_with_their_places() -> None:
    def faults(
        result: SearchResult, sheet: RankLayout, options: EmissionOptions
    ) -> tuple[Fault, ...]:
        raise AssertionError("asked of a plan that is not legal")

    result = differing_recompute((1, 2))
    found = refusals(result, replace(PLAIN, faults=faults), EmissionOptions())
    (fault,) = found
    assert fault.field.startswith("plan.pipelines[0].stages[")
    assert "recomputes the same on all stages" in fault.message
    with pytest.raises(InputError, match="recomputes the same"):
        emission_for(result, PLAIN, EmissionOptions())


def test_equal_faults_of_stages_are_one() -> None:
    def at(stage: int, message: str = "is odd") -> Fault:
        return Fault(field=f"plan.pipelines[0].stages[{stage}].recompute", message=message)

    other = Fault(field="plan.sharding", message="is odd")
    merged = merged_faults([*map(at, (0, 1, 2, 5, 7, 8)), at(3, "is even"), other, at(12)])
    assert [(each.field, each.message) for each in merged] == [
        ("plan.pipelines[0].stages[0].recompute", "stages 0-2, 5, 7-8, 12: is odd"),
        ("plan.pipelines[0].stages[3].recompute", "is even"),
        ("plan.sharding", "is odd"),
    ]
    assert plan_faults([other, Fault(field="--data", message="is missing")]) == (other,)


def test_names_that_no_shell_should_see_fail_before_anything_is_written(tmp_path: Path) -> None:
    """A name with shell characters does nothing but fail validation."""
    result = two_regions()
    path = tmp_path / "plan.json"
    save_result(result, path)
    for bad in ("$(touch pwned)", "a; rm -rf ~", "a\nb", "-oProxyCommand=x", "a b", "../x", "`id`"):
        document = json.loads(path.read_text())
        document["inputs"]["cluster"]["islands"][0]["node_names"] = [bad, "fine"]
        hostile = tmp_path / "hostile.json"
        hostile.write_text(json.dumps(document))
        with pytest.raises(InputError):
            hetplan.emit(hostile, "megatron", tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_the_library_verb_writes_a_folder(tmp_path: Path) -> None:
    result = two_regions()
    path = tmp_path / "plan.json"
    save_result(result, path)
    out = tmp_path / "run"
    emission = hetplan.emit(path, "megatron", out)
    assert {each.path for each in emission.files} == {
        str(each.relative_to(out)) for each in out.rglob("*") if each.is_file()
    }
    assert load_plan(out / "plan.json").plan == result.plan
    with pytest.raises(InputError, match="not empty"):
        hetplan.emit(result, "megatron", str(out))
    hetplan.emit(result, "megatron", str(out), EmissionOptions(steps=7), force=True)
