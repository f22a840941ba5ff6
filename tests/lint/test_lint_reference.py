"""Every trap in tables of collectives that the README of the reference folder lists is found.

The folder is not part of the project: these tests are skipped where it is absent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")

TRAPS = (
    ("1e12 us and zero bandwidth", "failure-as-number", "collectives", 2300),
    ("19 rows without a size", "missing-size", "collectives", 19),
    ("the A100 table is flat to 4 MiB", "flat-then-steep", "collectives", 1),
    ("the A100 table starts at 1 MiB", "no-small-messages", "collectives", 7),
)
"""(trap, rule that finds it, part of the file's path, least rows)."""


def test_every_trap_is_found() -> None:
    found = findings(read_all([REFERENCE / "unit"], LaunchContext())).findings
    assert not [each for each in found if each.rule == "file-is-wrong"]
    for trap, rule, part, least in TRAPS:
        matching = [each for each in found if each.rule == rule and part in each.file]
        assert sum(each.count for each in matching) >= least, trap
