"""Lines about a plan are plain text; only tables are markup."""

from __future__ import annotations

from dataclasses import fields

from hetplan.reports.explained import against_lines
from hetplan.search.explained.against import Against


def test_brackets_of_a_fault_stand_as_they_are() -> None:
    fault = "devices 9 do not exist [devices exist]"
    found = Against(**{each.name: None for each in fields(Against)} | {"faults": (fault,)})
    assert next(line for line in against_lines(found) if fault in line)
