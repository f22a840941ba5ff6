"""The command: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

from lint_samples import Bundle
from typer.testing import CliRunner, Result

from hetplan.cli.main import app

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(each) for each in arguments)])


def test_a_warning_is_0_and_strict_makes_it_2(tmp_path: Path) -> None:
    bundle = Bundle.draw(2, "collectives")
    bundle.collectives[3]["size_bytes"] = ""
    bundle.write(tmp_path, "collectives")
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "warning: missing-size (line 5)" in result.stdout
    assert run(tmp_path, "--strict").exit_code == 2


def test_an_error_is_2_with_the_rule_and_what_to_do_once(tmp_path: Path) -> None:
    bundle = Bundle.draw(2, "collectives")
    for row in bundle.collectives[3:6]:
        row.update(time_us=1e12, busbw_GBps=0)
    bundle.write(tmp_path, "collectives")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "error: failure-as-number (3 rows, lines 5, 6, 7)" in result.stdout
    assert result.stdout.count("What to do: Drop these rows.") == 1


def test_what_the_files_were_read_as_is_said(tmp_path: Path) -> None:
    script, results = tmp_path / "run", tmp_path / "samples-cpu-layers.csv"
    script.write_text("#!/bin/sh\nhosts=node[1-2]\n")
    results.write_text('# {"device": "cpu", "schema": "hetplan.provenance/2"}\ndevice\n')
    files = (f"{kind}s/{name}.yaml" for kind, name in (
        ("model", "gpt-tiny"), ("cluster", "this-machine"), ("job", "gpt-tiny")
    ))  # fmt: skip
    result = run(*(CONFIGS / file for file in files), tmp_path)
    assert result.exit_code == 0
    assert "is text or code" in result.stdout
    assert "`hetplan profile merge` checks them" in result.stdout
    assert "3 files read (model, cluster, job; held against each other), 2 skip" in result.stdout
