"""SimuMax's efficiencies by shape (unit/gemm_efficiency.csv) as operator samples.

Each row names the nominal rate that its efficiency was computed with, so it is a time
(`evaluation.accuracy.simumax_shapes`). Rows that differ only by a key that changes no work
(qkv_contiguous; main_grad_dtype of a forward pass) are several measurements of one shape.
"""

from __future__ import annotations

from pathlib import Path

from evaluation.accuracy.simumax_shapes import efficiency_sample
from evaluation.accuracy.unit_notes import Notes, provenance, read_rows
from hetplan.errors import Fault, InputError
from hetplan.lint.rows import EfficiencyRow
from hetplan.profiling.samples import OperatorSample, ProfileSet

FILE = Path("unit") / "gemm_efficiency.csv"
TOOL = "SimuMax efficiency tables"


def read_products(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per device of the table."""
    material = read_rows(folder / FILE, notes)
    if material is None:
        return ()
    by_device: dict[str, list[OperatorSample]] = {}
    for row in material.efficiencies:
        found = efficiency_sample(
            device=notes.kind(row.device),
            operation=row.operation,
            shape=row.shape,
            efficiency=row.efficiency,
            peak_flops_per_second=_peak_of(row),
        )
        if isinstance(found, str):
            notes.unused[f"gemm_efficiency.csv: {found}"] += 1
        else:
            by_device.setdefault(row.device, []).append(found)
    return tuple(_population(label, samples, notes) for label, samples in by_device.items())


def _peak_of(row: EfficiencyRow) -> float:
    """The rate of which the row's efficiency is a share; without it there is no time."""
    if row.peak_flops_per_second is None:
        message = "this cell is empty; write the nominal rate in TFLOP/s"
        raise InputError(
            Fault(file=row.place.file, line=row.place.line, field="peak_tflops", message=message)
        )
    return row.peak_flops_per_second


def _population(label: str, samples: list[OperatorSample], notes: Notes) -> ProfileSet:
    device = notes.kind(label)
    words = (
        "bfloat16; products by Transformer Engine, gradients of weights accumulated into their "
        "output; attention causal, in shapes of the full square; one time per shape, whose spread "
        "is not said"
    )
    return ProfileSet(
        layers=(),
        links=(),
        operators=tuple(samples),
        provenance=(provenance(device, label, tool=TOOL, file=str(FILE), words=words),),
    )
