"""The start-up law on MLPerf's results: its coefficients and its error on systems left out.

A system is one submitter with one device kind: its storage, network and software are alike, so its
rows are left out together.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.output import WORDS, Answer, Section, frame_of
from hetplan.cost.goodput.startup import StartUpLaw
from hetplan.errors import InputError
from hetplan.predict.regression import (
    Rows,
    conformal_halfwidth,
    fit_nonnegative,
    left_out_errors,
    predict,
)

FILE = Path("runs/mlperf_v4.csv")
HELD = 0.003
"""Weight of what holds the coefficients near equal parts, over the rows' mean power: of 0, 0.003,
0.01 and 0.03 the one with the least error on systems left out. Without it the start of the
processes is 0 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpRow:
    """One result."""

    system: str
    model: str
    ranks: int
    stages: int
    parameters: float
    compiles: bool
    step_seconds: float
    measured_seconds: float

    @property
    def columns(self) -> tuple[float, ...]:
        """What the law's coefficients multiply; last the warm-up steps of MLPerf."""
        return (
            1.0,
            float(self.ranks * self.stages),
            self.parameters,
            float(self.compiles),
            self.step_seconds,
        )


def startup_rows(reference: Path) -> tuple[StartUpRow, ...]:
    """Every result with a start-up time."""
    path = reference / FILE
    if not path.is_file():
        raise InputError(f"{path} is not there; give the folder of measurements with --reference")
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seconds = re.search(r"\binit_s=(\d+(?:\.\d+)?)", row["other"])
            if seconds is None:
                continue
            # As in "mlcommons/training_results_v4.1@b87b9e39 Dell/results/XE9680/gpt3".
            submitter = row["source_ref"].split()[1].partition("/")[0]
            found.append(
                StartUpRow(
                    system=f"{submitter}, {row['gpu']}",
                    model=row["model"],
                    ranks=int(row["gpus"]),
                    stages=int(row["pp"]),
                    parameters=float(row["params_b"]) * 1e9,
                    compiles="CUDA_GRAPH=1" in row["other"],
                    step_seconds=float(row["step_time_s"]),
                    measured_seconds=float(seconds[1]),
                )
            )
    return tuple(found)


def fit_law(rows: Rows, seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients held near those with which every column is an equal part of the usual time."""
    part = statistics.median(seconds) / len(rows[0])
    centre = []
    for column in zip(*rows, strict=True):
        there = [value for value in column if value > 0.0]
        centre.append(part / statistics.mean(there) if there else 1.0)
    return fit_nonnegative(rows, seconds, centre=centre, weight=HELD)


def fitted_startup(rows: Sequence[StartUpRow]) -> tuple[StartUpLaw, tuple[float, ...], float]:
    """The law, log(measured / predicted) of every row by a fit without its system, and seconds of
    warm-up per second of a step.
    """
    columns = [row.columns for row in rows]
    seconds = [row.measured_seconds for row in rows]
    started, grouped, loaded, compiled, warmed = fit_law(columns, seconds)
    errors = left_out_errors(columns, seconds, [row.system for row in rows], fit=fit_law)
    law = StartUpLaw(
        started_seconds=started,
        grouped_seconds=grouped,
        loaded_seconds=loaded,
        compiled_seconds=compiled,
        log_halfwidth=conformal_halfwidth(errors) or math.inf,
    )
    return law, errors, warmed


def startup_answer(reference: Path) -> Answer:
    """Every row beside its prediction without its system, and the errors."""
    rows = startup_rows(reference)
    law, errors, warmed = fitted_startup(rows)
    own = (*_coefficients(law), warmed)
    frame = frame_of(rows)
    frame["fitted_seconds"] = [predict(own, row.columns) for row in rows]
    frame["left_out_seconds"] = [
        row.measured_seconds / math.exp(error) for row, error in zip(rows, errors, strict=True)
    ]
    frame["error"] = frame["left_out_seconds"] / frame["measured_seconds"] - 1.0
    sizes = frame["error"].abs()
    large = sizes[frame["ranks"] >= 1000]
    return Answer(
        sections=(_section(frame),),
        lines=(
            f"{len(rows)} results of {frame['system'].nunique()} systems, each left out in turn: "
            f"mean error {sizes.mean():.1%}, median {sizes.median():.1%}, worst {sizes.max():.1%}; "
            f"{large.mean():.1%} on {len(large)} of 1,000 ranks and more",
            f"90 % interval: a factor of {math.exp(law.log_halfwidth):.3g} either way",
            f"started {law.started_seconds:.4g} s, grouped {law.grouped_seconds:.4g} s a rank and "
            f"stage, loaded {law.loaded_seconds * 1e9:.4g} s a billion parameters, compiled "
            f"{law.compiled_seconds:.4g} s, warm-up {warmed:.3g} steps (MLPerf's own)",
        ),
        values={"coefficients": own, "log_halfwidth": law.log_halfwidth},
    )


def _coefficients(law: StartUpLaw) -> tuple[float, ...]:
    return law.started_seconds, law.grouped_seconds, law.loaded_seconds, law.compiled_seconds


def _section(frame: object) -> Section:
    return Section(
        frame=frame,  # type: ignore[arg-type]
        name="rows",
        title="Start-up, by a law that did not see the system",
        columns={
            "system": ("system", WORDS),
            "model": ("model", WORDS),
            "ranks": ("ranks", "{:,}"),
            "measured, s": ("measured_seconds", "{:.0f}"),
            "predicted, s": ("left_out_seconds", "{:.0f}"),
            "error": ("error", "{:+.0%}"),
        },
    )
