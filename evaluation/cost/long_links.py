"""How well are links predicted that were not measured? Every pair of cities, left out in turn.

The pairs are those published with DT-FM (Yuan et al., NeurIPS 2022): ten cities, round trips of 11
to 265 ms. Three models are compared: a constant goodput, one window for all, and a window per
endpoint (`evaluation.cost.long_link_models`).
"""

from __future__ import annotations

import csv
from pathlib import Path

from evaluation.cost.long_link_models import LeftOutErrors, LongLinkModel, Pair, left_out_errors
from hetplan.errors import InputError

PAIRS_FILE = Path("unit") / "wan_city_pairs.csv"
"""In the folder of reference data."""


def city_pairs(reference: Path) -> tuple[Pair, ...]:
    """The measured pairs; an InputError where the file is not there or a row is wrong."""
    path = reference / PAIRS_FILE
    if not path.is_file():
        raise InputError(f"{path} is not there; name the folder of reference data")
    with path.open(newline="") as file:
        try:
            return tuple(
                Pair(
                    left=row["from"],
                    right=row["to"],
                    round_trip_seconds=float(row["rtt_or_delay_ms_as_published"]) / 1e3,
                    goodput_bytes_per_second=float(row["bandwidth_gbit_per_s"]) * 1e9 / 8,
                )
                for row in csv.DictReader(file)
            )
        except (KeyError, ValueError) as fault:
            raise InputError(f"{path}: {fault} is missing or no number") from fault


def long_link_errors(reference: Path) -> tuple[LeftOutErrors, ...]:
    """One row per model."""
    pairs = city_pairs(reference)
    return tuple(left_out_errors(pairs, model) for model in LongLinkModel)
