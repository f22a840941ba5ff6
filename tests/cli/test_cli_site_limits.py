"""Limits of a site at the command line: a layout that breaks one, and values that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetplan.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = """
schema: hetplan.cluster/4
name: one
sites: [{name: A, LIMIT}]
regions:
  - {name: a, site: A, islands: [{name: h, node: dgx-h100, nodes: 4}]}
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("power_limit: 20 kW", "power_limit of A: 20 kW, the plan takes 30.5"),
        ("max_nodes: 3", "max_nodes of A: 3, the plan takes 4"),
        ("max_nodes: 0", "sites[0].max_nodes"),
        ("power_limit: 2 kW", "feeds no node of its regions"),
        ("storage: {read: 1 GB/s}", "sites[0].storage.write"),
    ],
)
def test_a_broken_limit_is_one_clear_line(tmp_path: Path, limit: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.replace("LIMIT", limit))
    words = ["--model", str(ROOT / "configs/models/llama-2-7b.yaml"), "--cluster", str(file)]
    words += ["--job", str(ROOT / "configs/jobs/llama-2-7b.yaml"), "--tp", "1", "--dp", "32"]
    outcome = CliRunner().invoke(app, ["estimate", *words])
    assert outcome.exit_code == 2, outcome.output
    assert said in outcome.output
