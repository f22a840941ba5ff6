"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lint_samples import Bundle
from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.lint.registry import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checking.md"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(each) for each in arguments)])


def test_nothing_found_is_0(tmp_path: Path) -> None:
    Bundle.draw(2, "collectives").write(tmp_path, "collectives")
    result = run(tmp_path)
    assert result.exit_code == 0
    assert result.stdout == "1 file read (table): 0 impossible, 0 suspicious\n"


def test_suspicious_is_0_and_strict_makes_it_2(tmp_path: Path) -> None:
    bundle = Bundle.draw(2, "collectives")
    bundle.collectives[3]["size_bytes"] = ""
    bundle.write(tmp_path, "collectives")
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "suspicious: missing-size (line 5)" in result.stdout
    assert run(tmp_path, "--strict").exit_code == 2


def test_impossible_is_2_with_the_rule_and_what_to_do_once(tmp_path: Path) -> None:
    bundle = Bundle.draw(2, "collectives")
    for row in bundle.collectives[3:6]:
        row.update(time_us=1e12, busbw_GBps=0)
    bundle.write(tmp_path, "collectives")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "impossible: failure-as-number (3 rows, lines 5, 6, 7)" in result.stdout
    assert result.stdout.count("What to do: Drop these rows.") == 1


def test_what_the_files_were_read_as_is_said(tmp_path: Path) -> None:
    configs = PAGE.parents[1] / "configs"
    script, results = tmp_path / "run", tmp_path / "samples-cpu-layers.csv"
    script.write_text("#!/bin/sh\nhosts=node[1-2]\n")
    results.write_text('# {"device": "cpu", "schema": "hetplan.provenance/2"}\ndevice\n')
    files = (f"{kind}s/{name}.yaml" for kind, name in (
        ("model", "gpt-tiny"), ("cluster", "this-machine"), ("job", "gpt-tiny")
    ))  # fmt: skip
    result = run(*(configs / file for file in files), tmp_path)
    assert result.exit_code == 0
    assert "is text or code" in result.stdout
    assert "`hetplan profile merge` checks them" in result.stdout
    assert "3 files read (model, cluster, job; held against each other), 2 skip" in result.stdout


def test_an_importer_that_needs_more_names_its_options(tmp_path: Path) -> None:
    path = tmp_path / "DeviceType.A100_tp1_bs1.json"
    path.write_text('{"execution_time": {"layer_compute_total_ms": [1.0]}}')
    assert "needs --device" in run(path).stdout
    result = run(path, "--kind", "metis")
    assert result.exit_code == 2
    assert "metis needs --precision" in result.stderr
    assert "unknown kind" in run(path, "--kind", "meti").stderr


def test_a_wrong_file_is_2(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("schema: hetplan.job/1\nglobal_batch_size: many\n")
    result = run(path)
    assert result.exit_code == 2
    assert "file-is-wrong" in result.stdout


def test_json_is_the_same_findings(tmp_path: Path) -> None:
    bundle = Bundle.draw(2, "collectives")
    bundle.collectives[3]["size_bytes"] = ""
    bundle.write(tmp_path, "collectives")
    found = json.loads(run(tmp_path, "--json").stdout)
    assert [each["rule"] for each in found["findings"]] == ["missing-size"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_explains_itself(rule: object) -> None:
    result = run("--explain", rule.id)  # type: ignore[attr-defined]
    assert result.exit_code == 0
    assert "What to do: " in result.stdout


def test_mistakes_of_the_user_are_2(tmp_path: Path) -> None:
    assert run().exit_code == 2
    assert run(tmp_path / "nowhere").exit_code == 2
    assert run("--explain", "missing-sise").exit_code == 2


def test_the_page_lists_every_rule_as_it_is() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert listed == [(rule.id, rule.severity.value, rule.title) for rule in RULES]


def test_the_list_of_rules_names_them_all() -> None:
    lines = run("--rules").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [rule.id for rule in RULES]
