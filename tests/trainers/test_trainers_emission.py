"""What a plan's folder holds, and how a target's refusals are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_models import MODEL
from trainer_plans import JOB, PLAIN, chosen, cluster, island, result_of, two_regions

import hetplan
from hetplan.errors import InputError
from hetplan.plans.build import plan_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.files import load_legal_plan, save_result
from hetplan.trainers.emission import (
    emission_for,
)


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
    assert load_legal_plan(out / "plan.json").plan == result.plan
    with pytest.raises(InputError, match="not empty"):
        hetplan.emit(result, "megatron", str(out))
    hetplan.emit(result, "megatron", str(out), EmissionOptions(steps=7), force=True)


def test_tables_stay_tables_whatever_islands_are_called() -> None:
    name = "a|b `c`\u2028<d>"
    machines = cluster(replace(island("a"), name=name, region="e|f"))
    result = result_of(machines, plan_of(MODEL, machines, JOB, chosen((name, 12), tp=8)))
    emission = emission_for(result, PLAIN, EmissionOptions())
    (readme,) = [each.text for each in emission.files if each.path == "README.md"]
    (row,) = [line for line in readme.splitlines() if "e\\|f" in line]
    assert "a\\|b 'c'?&lt;d>" in row
    assert row.replace("\\|", "").count("|") == 7
