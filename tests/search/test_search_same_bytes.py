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
from hetplan.search.result import SearchResult
from hetplan.search.search import search

TARGETS = ["flagscale", "megatron", "native", "torchtitan"]
GAP = 0.05
LARGE_GAP = {"flagscale": 0.2, "megatron": 0.02, "native": 0.3, "torchtitan": 0.02}
"""Of the larger questions: what their searches prove within some seconds."""


def _small(trainer: str) -> tuple[int, Cluster, Job]:
    """(layers, cluster, job); the more a target can do, the smaller its question."""
    asked = replace(job(8 if trainer == "native" else 24, gap=GAP), target=trainer)
    per_node = 2 if trainer == "native" else 4
    slow = island("slow", kind="old", teraflops=40.0, nodes=1, per_node=per_node)
    quick = island("quick", kind="new", teraflops=120.0, nodes=1, per_node=per_node)
    if trainer == "torchtitan":  # stages on two islands of one kind too
        return 8, cluster(slow, replace(slow, name="other"), quick), asked
    return 8, cluster(slow, quick), asked


def _large(trainer: str) -> tuple[int, Cluster, Job]:
    """The same; plans of several pipelines are many, so there of a smaller one."""
    asked = replace(job(24, gap=LARGE_GAP[trainer]), target=trainer)
    slow = island("slow", kind="old", teraflops=40.0, nodes=2, per_node=4)
    quick = island("quick", kind="new", teraflops=120.0, nodes=2, per_node=4)
    if trainer == "native":
        few = cluster(replace(slow, nodes=1), replace(quick, nodes=1))
        return 8, few, replace(asked, global_batch_size=8)
    return 16, cluster(slow, replace(slow, name="other", nodes=1), quick), asked


def find(
    trainer: str, journal: Path | None = None, *, resume: bool = False, large: bool = False
) -> SearchResult:
    """The answer of a question."""
    layers, where, asked = (_large if large else _small)(trainer)
    predictor = FittedPredictor.datasheet_only()
    return search(model(layers), where, asked, predictor, journal=journal, resume=resume)


_PROGRAM = """
import sys
from hashlib import sha256
from test_search_same_bytes import TARGETS, find
from hetplan.search.files import result_text
for trainer in TARGETS:
    result = find(trainer, large=sys.argv[1] == "large")
    text = result_text(result).encode()
    print(trainer, result.certificate.status, sha256(text).hexdigest())
"""


def _elsewhere(hash_seed: str, size: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, size],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def _same_in_two_processes(size: str) -> None:
    both = [_elsewhere(hash_seed, size) for hash_seed in ("1", "2")]
    first, second = (each.communicate()[0].splitlines() for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert first == second
    assert [line.split()[:2] for line in first] == [[each, "optimal"] for each in TARGETS]


def _same_after_a_break(trainer: str, path: Path, parts: tuple[float, ...], *, large: bool) -> None:
    whole = result_text(find(trainer, path, large=large))
    written = path.read_bytes()
    for part in parts:
        path.write_bytes(written[: int(part * len(written))])
        assert result_text(find(trainer, path, resume=True, large=large)) == whole


@pytest.mark.slow
def test_every_process_gives_the_same_bytes() -> None:
    _same_in_two_processes("small")


@pytest.mark.slow
def test_every_process_gives_the_same_bytes_of_a_larger_question() -> None:
    _same_in_two_processes("large")


@pytest.mark.parametrize(
    "trainer",
    [
        "megatron",
        *(pytest.param(each, marks=pytest.mark.slow) for each in TARGETS if each != "megatron"),
    ],
)
def test_a_search_that_was_broken_off_ends_with_the_same_bytes(
    trainer: str, tmp_path: Path
) -> None:
    _same_after_a_break(trainer, tmp_path / "journal.jsonl", (0.25, 0.6), large=False)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TARGETS)
def test_a_larger_search_that_was_broken_off_ends_with_the_same_bytes(
    trainer: str, tmp_path: Path
) -> None:
    _same_after_a_break(trainer, tmp_path / "journal.jsonl", (0.1, 0.5, 0.9), large=True)
