"""A plan file that was changed is named by every command that reads it, and `estimate` goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from plan_files import write_sealed
from search_jobs import cluster, island, job, model

import hetplan
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_legal_plan, result_text
from hetplan.search.search import search

Data = dict[str, Any]


@lru_cache
def _text() -> str:
    two = cluster(island("slow", kind="old", teraflops=40.0), island("quick"))
    sources = (("predictor", "00ff"),)
    datasheet = FittedPredictor.datasheet_only()
    return result_text(search(model(4), two, job(8, gap=0.2), datasheet, sha256=sources))


def planned(folder: Path, change: Callable[[Data], None] = lambda data: None) -> Path:
    data = json.loads(_text())
    change(data)
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    return path


def _bound(data: Data) -> None:
    data["certificate"]["lower_bound_seconds"] *= 0.999


def _digest(data: Data) -> None:
    data["inputs"]["sha256"][0][1] = "11ff"


def _price(data: Data) -> None:
    data["estimate"]["stages"][0]["forward_seconds"] *= 0.999


COMMANDS = (
    "check PLAN", "explain PLAN", "explain against PLAN PLAN", "explain prices PLAN",
    "explain traffic PLAN", "explain ranks PLAN", "report PLAN --out OUT.html", "verify PLAN",
    "emit PLAN --out OUT", "launch PLAN", "launch elastic PLAN --save OUT --save-every 1",
    "launch check-numerics PLAN", "compare train.log --plan PLAN",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_file_that_was_changed(command: str, tmp_path: Path) -> None:
    words = [str(planned(tmp_path, _bound)) if word == "PLAN" else word for word in command.split()]
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    found = run(*words)
    assert found.exit_code == 2
    said = " ".join((found.stdout + found.stderr).split())
    assert "the file was changed after hetplan wrote it" in said
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("change", [_bound, _digest, _price])
def test_certificate_digest_and_price_are_sealed(
    change: Callable[[Data], None], tmp_path: Path
) -> None:
    assert load_legal_plan(planned(tmp_path)).certificate is not None
    with pytest.raises(InputError, match="was changed") as refused:
        hetplan.load_plan(planned(tmp_path, change))
    assert refused.value.faults[0].field == "seal"


@pytest.mark.parametrize("schema", ["hetplan.plan/8", "hetplan.plan/9", "hetplan.plan/12"])
def test_an_older_number_is_no_way_around_a_seal(schema: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was changed"):
        load_legal_plan(planned(tmp_path, lambda data: data.update(schema=schema, seed=7)))
    without = planned(tmp_path, lambda data: data.update(schema="hetplan.plan/9", seal=""))
    with pytest.raises(InputError, match="was changed"):
        load_legal_plan(without)


def test_estimate_prices_what_was_changed_and_seals_it(tmp_path: Path) -> None:
    def swap(data: Data) -> None:
        data["plan"]["overlap"]["reduction"] = not data["plan"]["overlap"]["reduction"]
        data["estimate"]["step_seconds"] = 1e-7

    path, out = planned(tmp_path, swap), tmp_path / "new.json"
    priced = run("estimate", str(path), "--out", str(out))
    assert priced.exit_code == 0, priced.stderr
    assert "was changed after hetplan wrote it: its plan is priced, without a proof" in " ".join(
        priced.stderr.split()
    )
    again = load_legal_plan(out)
    assert again.certificate is None
    assert again.estimate.step_seconds > 1e-4
    assert "was changed" not in run("estimate", str(out)).stderr


def test_estimate_still_refuses_a_plan_that_breaks_a_rule(tmp_path: Path) -> None:
    def twice(data: Data) -> None:
        stages = data["plan"]["pipelines"][0]["stages"]
        stages[1]["replicas"][0]["devices"] = stages[0]["replicas"][0]["devices"]

    refused = run("estimate", str(planned(tmp_path, twice)))
    assert refused.exit_code == 2
    assert "is already used by pipelines[0].stages[0]" in refused.stderr


def _at(*place: str | int, times: float = 1.0, value: float | None = None) -> Any:
    return place, times, value


LIES = (
    (_at("certificate", "lower_bound_seconds", times=9.0), "certificate.lower_bound_seconds"),
    (_at("certificate", "gap", value=0.5), "certificate.gap"),
    (_at("estimate", "tokens_per_second", times=1.01), "estimate.tokens_per_second"),
    (_at("estimate", "p95_seconds", value=1e-6), "estimate.p95_seconds"),
    (_at("estimate", "components", 0, "seconds", times=1.01), "estimate.components"),
    (_at("estimate", "stages", 0, "components", 0, "seconds", times=1.1), "estimate.stages[0]"),
    (_at("estimate", "stages", 0, "memory", "activation_bytes", value=1e15), "estimate.stages[0]"),
    (_at("estimate", "stages", 1, "busy_seconds", value=-1.0), "estimate.stages[1].busy_seconds"),
    (_at("estimate", "mfu", value=1e308), "estimate.mfu"),
    (_at("certificate", "proof", "several_bound_seconds", value=1e308), "certificate.proof"),
    (_at("inputs", "cluster", "islands", 0, "memory_bytes", value=1e308), "inputs.cluster"),
    (_at("plan", "pipelines", 0, "num_microbatches", times=2), "plan.pipelines"),
)


@pytest.mark.parametrize(("lie", "field"), LIES)
def test_a_lie_with_a_seal_of_its_own_is_named(lie: Any, field: str, tmp_path: Path) -> None:
    """A seal is a digest that anybody can make; the parts of a file have to agree all the same."""
    (*steps, last), times, value = lie
    data = json.loads(_text())
    holder = data
    for step in steps:
        holder = holder[step]
    holder[last] = holder[last] * times if value is None else value
    path = tmp_path / "plan.json"
    write_sealed(path, data)
    with pytest.raises(InputError) as refused:
        load_legal_plan(path)
    assert refused.value.faults[0].field.startswith(field)
