"""What part of its printed rate does a kind's matrix product sustain, where samples say nothing?

    rate = peak * products,   in `sustained.csv` by the beginning of a kind's name, first match

Published best shapes are not what a model's shapes reach: medians of large products are .89 of the
best shape on A100 (.77 of .87), .90 on H100 (.72 of .80), .81 on B200 (.63 of .78); a figure of the
best shape alone is multiplied by .88. Where nothing is public the class answers, with the widest
interval. Figures are of 16 bit: float32 keeps the default rate and takes the interval. An empty
figure is the default of `hetplan.predict.datasheet`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """One line of the table; a figure of 0 is the default."""

    kinds: tuple[str, ...]
    """Beginnings of names."""
    products: float
    """Sustained over peak rate of large products."""
    log_halfwidth: float
    """Judged, not fitted: wider where the figure is of a best shape, another board or a class."""
    attention: float
    """The same of causal attention; 0: in proportion to the products."""
    source: str


@cache
def sustained(kind: str) -> Sustained:
    """The first line that has a beginning of the kind's name; the last one fits all."""
    return next(line for line in table() if kind.startswith(line.kinds))


@cache
def table() -> tuple[Sustained, ...]:
    """Every line, the more special ones first."""
    path = Path(__file__).with_name("sustained.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            Sustained(
                kinds=tuple(row["kinds"].split(" ")),
                products=float(row["products"] or 0.0),
                log_halfwidth=float(row["log_halfwidth"] or 0.0),
                attention=float(row["attention"] or 0.0),
                source=row["source"],
            )
            for row in csv.DictReader(file)
        )
