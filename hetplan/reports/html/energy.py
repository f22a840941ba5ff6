"""The section of a plan's energy, its cost and the front."""

from __future__ import annotations

from typing import Any

from hetplan.reports.energy import (
    FRONT_PROOF,
    energy_line,
    front_cells,
    saved_part,
    watts_words,
)
from hetplan.reports.html.values import PlanView
from hetplan.search.descriptions import layout_words
from hetplan.units import digits


def energy_section(view: PlanView) -> dict[str, Any]:
    """What the template fills in."""
    result = view.result
    line, part = energy_line(result), saved_part(view.clocks, view.energy)
    if part is not None and part > 0.0:
        line += f"; the clocks below would save {part:.1%} of the energy"
    slower = [each for each in view.clocks if each.mean_clock < 1.0]
    several = len(result.plan.pipelines) > 1
    return {
        "line": line[:1].upper() + line[1:],
        "islands": [
            {
                "part": each,
                "computing": watts_words(each.law.computing_watts),
                "communicating": watts_words(each.law.communicating_watts),
                "mean": watts_words(each.mean_watts),
                "kwh": digits(each.kwh_per_step),
            }
            for each in (() if view.energy is None else view.energy.islands)
        ],
        "clocks": [
            {
                "stage": (f"pipeline {each.pipeline}, " if several else "") + f"stage {each.stage}",
                "clock": each.mean_clock,
                "saved": "unknown" if each.kwh_saved is None else digits(each.kwh_saved),
            }
            for each in slower[:_MOST_STAGES]
        ],
        "front": [
            {"cells": front_cells(point), "layout": layout_words(point.plan)}
            for point in (result.alternatives if result.is_front else ())
        ],
        "proof": FRONT_PROOF,
    }


_MOST_STAGES = 64
"""Rows of a table that can still be looked through."""
