"""Lines about a plan are plain text; only tables are markup."""

from __future__ import annotations

from hetplan.reports.explained import against_lines
from hetplan.whatif.against import Against


def test_brackets_of_a_fault_stand_as_they_are() -> None:
    fault = "devices 9 do not exist [devices exist]"
    found = Against(
        illegal=(fault,),
        choices=(),
        found_seconds=1.0,
        other_seconds=None,
        components=(),
        below_bound=False,
        inputs_differ=(),
    )
    assert list(against_lines(found)) == [
        f"the other plan is not possible here: {fault}",
        "it cannot be priced",
    ]
