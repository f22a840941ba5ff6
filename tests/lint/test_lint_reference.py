"""Every trap that the README of the reference folder lists is found, by which rule and where.

The folder is not part of the project: these tests are skipped where it is absent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.lint.findings import Finding, Findings
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")

TRAPS = (
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


@pytest.fixture(scope="module")
def found() -> Findings:
    return findings(read_all([REFERENCE], LaunchContext()))


def matching(found: Findings, rule: str, part: str) -> list[Finding]:
    return [each for each in found.findings if each.rule == rule and part in each.file]


def test_every_trap_is_found(found: Findings) -> None:
    for trap, rule, part, least in TRAPS:
        assert sum(each.count for each in matching(found, rule, part)) >= least, trap


def test_no_file_of_the_folder_is_refused(found: Findings) -> None:
    assert [each for each in found.findings if each.rule == "file-is-wrong"] == []
    assert len(found.files) >= 3


@pytest.mark.parametrize("name", ["simumax_b200.csv"])
def test_files_without_a_trap_are_silent(found: Findings, name: str) -> None:
    assert [each for each in found.findings if each.file.endswith(name)] == []
