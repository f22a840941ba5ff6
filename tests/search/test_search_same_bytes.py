"""One question has one answer: the same bytes in every process, and after every interruption."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import result_text
from hetplan.search.journal import JournalFile
from hetplan.search.result import SearchResult
from hetplan.search.search import search

TARGETS = ["flagscale", "megatron", "native", "torchtitan"]
GAP = {"flagscale": 0.2, "megatron": 0.02, "native": 0.3, "torchtitan": 0.02}
"""What their searches prove within some seconds."""


def _question(trainer: str) -> tuple[int, Cluster, Job]:
    """(layers, cluster, job); plans of several pipelines are many, so there of a smaller one."""
    asked = replace(job(24, gap=GAP[trainer]), target=trainer)
    slow = island("slow", kind="old", teraflops=40.0, nodes=2, per_node=4)
    quick = island("quick", kind="new", teraflops=120.0, nodes=2, per_node=4)
    if trainer == "native":
        few = cluster(replace(slow, nodes=1), replace(quick, nodes=1))
        return 8, few, replace(asked, global_batch_size=8)
    return 16, cluster(slow, replace(slow, name="other", nodes=1), quick), asked


def find(trainer: str, journal: Path | None = None, *, resume: bool = False) -> SearchResult:
    """The answer of a question."""
    layers, where, asked = _question(trainer)
    predictor = FittedPredictor.datasheet_only()
    file = None if journal is None else JournalFile(journal, resume)
    return search(model(layers), where, asked, predictor, journal=file)


_PROGRAM = """
from hashlib import sha256
from test_search_same_bytes import TARGETS, find
from hetplan.search.files import result_text
for trainer in TARGETS:
    result = find(trainer)
    text = result_text(result).encode()
    print(trainer, result.certificate.status, sha256(text).hexdigest())
"""


def _elsewhere(hash_seed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


@pytest.mark.slow
def test_every_process_gives_the_same_bytes() -> None:
    both = [_elsewhere(hash_seed) for hash_seed in ("1", "2")]
    first, second = (each.communicate()[0].splitlines() for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert first == second
    assert [line.split()[:2] for line in first] == [[each, "optimal"] for each in TARGETS]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TARGETS)
def test_a_search_that_was_broken_off_ends_with_the_same_bytes(
    trainer: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    whole = result_text(find(trainer, path))
    written = path.read_bytes()
    for part in (0.1, 0.5, 0.9):
        path.write_bytes(written[: int(part * len(written))])
        assert result_text(find(trainer, path, resume=True)) == whole
