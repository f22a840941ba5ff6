"""Layouts priced on shipped clusters, as plan files."""

from __future__ import annotations

from pathlib import Path

from command_line import run

from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def planned(folder: Path, target: str, cluster: str, islands: str, *settings: str) -> SearchResult:
    out = folder / "plan.json"
    model, job = CONFIGS / "models" / "llama-2-7b.yaml", CONFIGS / "jobs" / "llama-2-7b.yaml"
    layout = ("--tp", "8", "--pp", "2", "--dp", "1", "--islands", islands, "--out", out)
    files = ("--model", model, "--cluster", CONFIGS / "clusters" / cluster, "--job", job)
    changes = [word for each in settings for word in ("--set", each)]
    done = run("estimate", *map(str, (*files, "--target", target, *layout, *changes)))
    assert out.exists(), done.stderr
    return load_legal_plan(out)
