"""Every trap that the README of the reference folder lists is found, by which rule and where.

The folder is not part of the project: these tests are skipped where it is absent.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hetplan.lint.findings import Finding, Findings
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")

TRAPS = (
    ("derived step times beside published ones", "mixed-step-time-kinds", "korthikanti", 2),
    ("TFLOP/s that count recompute", "rate-counts-recompute", "megatron_sc21", 10),
    ("causal attention at half", "rate-counts-causal-half", "nemo_performance", 30),
    ("recompute not published", "recompute-not-said", "nemo_performance", 57),
    ("tp=16 rows cross nodes", "tp-crosses-nodes", "vtrain_multi_node", 5),
    ("16 rows slower than their neighbours", "slower-than-neighbours", "vtrain_multi_node", 16),
    ("fp16 and fp32 in one table", "mixed-precisions", "layer_times", 17000),
    ("bwd_us is the input gradient only", "input-gradient-only", "layer_times", 4000),
    ("communication at tp > 1", "communication-inside", "layer_times", 3000),
    ("1e7 us marks out of memory", "time-sentinel", "layer_times", 90),
    ("fp32 that is TF32, A100-40 and GH-96", "faster-than-peak", "layer_times", 800),
    ("true fp32 for OPT-30", "one-label-two-precisions", "layer_times", 6),
    ("84 GPT-Neo rows copied from OPT-350", "copied-values", "layer_times", 84),
    ("Llama-3-8B rows too slow", "slower-than-class", "layer_times", 17),
    ("microbatch 1 includes warm-up, operators", "warm-up-inside", "layer_times", 10),
    ("B200 keys differ by output type", "key-ignores-a-column", "gemm_efficiency", 60),
    ("sdp counts full attention", "causal-attention-counted-full", "gemm_efficiency", 3),
    ("1e12 us and zero bandwidth", "failure-as-number", "collectives", 2300),
    ("19 rows without a size", "missing-size", "collectives", 19),
    ("the A100 table is flat to 4 MiB", "flat-then-steep", "collectives", 1),
    ("the A100 table starts at 1 MiB", "no-small-messages", "collectives", 7),
)
"""(trap, rule that finds it, part of the file's path, least rows)."""

SLOW_RUNS = {
    # (parameters in 1e9, tp, pp, microbatch size), as the project's notes on these runs list them
    *((39.1, 2, pp, size) for pp in (8, 16) for size in (2, 3, 6)),
    *((39.1, 4, 4, size) for size in (3, 6)),
    *((39.1, 4, 8, size) for size in (2, 3, 4)),
    *((39.1, 4, 16, size) for size in (6, 12)),
    (3.6, 8, 1, 64),
    (3.6, 8, 1, 2),
    (3.6, 4, 1, 2),
}


@pytest.fixture(scope="module")
def found() -> Findings:
    return findings(read_all([REFERENCE], LaunchContext()))


def matching(found: Findings, rule: str, part: str) -> list[Finding]:
    return [each for each in found.findings if each.rule == rule and part in each.file]


def test_every_trap_is_found(found: Findings) -> None:
    for trap, rule, part, least in TRAPS:
        assert sum(each.count for each in matching(found, rule, part)) >= least, trap


def test_the_slow_runs_are_found_and_no_others(found: Findings) -> None:
    (finding,) = matching(found, "slower-than-neighbours", "vtrain_multi_node")
    with Path(finding.file).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    words = finding.message.replace(",", "").split()
    lines = [int(word) for word in words if word.isdecimal()]
    # No cell of this table spans lines, so row 0 stands on line 2.
    slow = {
        (
            float(rows[line - 2]["params_b"]),
            *(int(rows[line - 2][key]) for key in ("tp", "pp", "micro_batch")),
        )
        for line in lines
    }
    assert slow == SLOW_RUNS


def test_no_file_of_the_folder_is_refused(found: Findings) -> None:
    assert [each for each in found.findings if each.rule == "file-is-wrong"] == []
    assert len(found.files) >= 15


@pytest.mark.parametrize("name", ["simumax_b200.csv"])
def test_files_without_a_trap_are_silent(found: Findings, name: str) -> None:
    assert [each for each in found.findings if each.file.endswith(name)] == []
