"""What stands under a plan that `hetplan emit` would not write a folder of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.reports.plans import refused_lines
from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def planned(folder: Path, target: str, cluster: str, islands: str) -> SearchResult:
    out = folder / "plan.json"
    model, job = CONFIGS / "models" / "llama-2-7b.yaml", CONFIGS / "jobs" / "llama-2-7b.yaml"
    layout = ("--tp", "8", "--pp", "2", "--dp", "1", "--islands", islands, "--out", out)
    files = ("--model", model, "--cluster", CONFIGS / "clusters" / cluster, "--job", job)
    given = ["estimate", *files, "--target", target, *layout]
    result = CliRunner().invoke(app, [str(each) for each in given])
    assert out.exists(), result.output
    return load_legal_plan(out)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_devices_of_two_vendors_are_said_under_the_plan(tmp_path: Path, target: str) -> None:
    lines = list(refused_lines(planned(tmp_path, target, "two-regions.yaml", "a100,mi300x")))
    assert lines[0].startswith("`hetplan emit` needs node_names of a100, mi300x: ")
    assert lines[1].startswith(f"`hetplan emit --target {target}` refuses this plan: plan.")
    assert "nccl" in lines[1]
    assert "rccl" in lines[1]
    assert lines[-1] == "`hetplan emit --nearest FILE` finds the fastest plan that it takes"
    assert len(lines) == 3


def test_nothing_is_said_of_plans_that_are_taken(tmp_path: Path) -> None:
    result = planned(tmp_path, "megatron", "two-regions.yaml", "a100")
    assert len(list(refused_lines(result))) == 1  # its nodes have no names
    named = tuple(
        replace(island, node_names=(f"{island.name}-[1-{island.nodes}]",))
        for island in result.inputs.cluster.islands
    )
    cluster = replace(result.inputs.cluster, islands=named)
    known = replace(result, inputs=replace(result.inputs, cluster=cluster))
    assert list(refused_lines(known)) == []


def test_hetplans_own_trainer_has_no_folder(tmp_path: Path) -> None:
    result = planned(tmp_path, "any", "two-regions.yaml", "a100")
    assert list(refused_lines(result)) == []
