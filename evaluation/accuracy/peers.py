"""What do other predictors reach on the same measured runs?

Figures are as their authors, or calculations with their published tools, state them; each says
which. They are printed beside hetplan's, never mixed with them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.accuracy.rows import RunRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """One tool's error on one data set."""

    tool: str
    mape: float
    median: float | None = None
    note: str = ""
    """What one must know before comparing."""
    source: str


_CALCULON = "calculon commit caa4b11 run on the rows' configurations"

PEERS: tuple[tuple[str, PeerFigure], ...] = (
    (
        "vtrain",
        PeerFigure(tool="calculon", mape=0.153, median=0.097, source=_CALCULON),
    ),
    (
        "vtrain",
        PeerFigure(
            tool="vTrain",
            mape=0.1473,
            note="its own claim, on its own multi-node rows",
            source="vTrain, MICRO 2024, validation on multi-node systems",
        ),
    ),
    (
        "sailor-clariden",
        PeerFigure(
            tool="Sailor",
            mape=0.089,
            note="its simulator with these plans' own profiles",
            source="Sailor's simulator, commit cf2c8e3, on sailor/validation",
        ),
    ),
    (
        "simumax",
        PeerFigure(
            tool="SimuMax",
            mape=0.0562,
            note="always low",
            source="SimuMax 4dcaae5, docs/b200, predictions printed beside the runs",
        ),
    ),
    (
        "korthikanti-table5",
        PeerFigure(
            tool="calculon",
            mape=0.0365,
            note="its own validation set",
            source="calculon commit caa4b11, validation of arXiv 2205.05198, table 5",
        ),
    ),
    ("megatron-sc21", PeerFigure(tool="calculon", mape=0.103, source=_CALCULON)),
)
"""(beginning of the source, figure)."""

_SIMUMAX_PREDICTION = re.compile(r"simumax_pred_ms=([0-9.]+)")


def peers_of(rows: Sequence[RunRow]) -> tuple[PeerFigure, ...]:
    """The figures of a data set; of SimuMax, where rows carry its predictions, over those rows."""
    if not rows:
        return ()
    source = rows[0].source.lower()
    found = [figure for beginning, figure in PEERS if source.startswith(beginning)]
    printed = [
        abs(float(match[1]) / 1e3 / row.step_seconds - 1.0)
        for row in rows
        if row.step_seconds and (match := _SIMUMAX_PREDICTION.search(row.other))
    ]
    if printed:
        found = [each for each in found if each.tool != "SimuMax"]
        found.append(
            PeerFigure(
                tool="SimuMax",
                mape=statistics.fmean(printed),
                median=statistics.median(printed),
                note="its predictions, printed beside these runs",
                source="column other of the rows",
            )
        )
    return tuple(found)
