"""What is shipped of other people's measurements: a profile store of samples, and their laws.

`python -m evaluation distil --silicon DIR --out profiles/kinds` writes both. The laws are what
`hetplan fit` makes of the samples, without single shapes: one point of a burst scatters by 10 %, so
no shape is looked up, and what errors near a shape would say is left out, with the interval as wide
as it is without.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.accuracy.unit_data import Notes
from evaluation.distil.operators import read_operators
from evaluation.output import Answer
from hetplan.files.encoding import encode
from hetplan.files.writing import write_atomically
from hetplan.predict.fit import SCHEMA, FittedLaws
from hetplan.predict.operator.laws import fit_operator_laws
from hetplan.predict.operator.values import OperatorLaw
from hetplan.profiling.samples import ProfileSet
from hetplan.profiling.store import OperatorWriter, read_populations
from hetplan.version import __version__

LAWS_FILE = "laws.json"


def distil(silicon: Path, out: Path) -> Answer:
    """Samples of `silicon`/operators into the store `out`, which they replace, and their laws."""
    notes = Notes()
    found = read_operators(silicon, notes)
    shutil.rmtree(out, ignore_errors=True)
    for each in found:
        OperatorWriter(out, each.provenance[0]).add_new(each.operators)
    for lock in out.rglob(".lock"):
        lock.unlink()
    # Read back, so that the laws are of what is shipped.
    laws = shipped_laws(read_populations(out))
    write_atomically(out / LAWS_FILE, encode(laws, schema=SCHEMA))
    lines = [
        f"{each.provenance[0].device}: {len(each.operators)} samples of "
        f"{len({sample.operator for sample in each.operators})} classes of operators"
        for each in found
    ]
    return Answer(lines=(*lines, f"{len(laws.operators)} laws", *notes.lines()))


def shipped_laws(populations: Sequence[ProfileSet]) -> FittedLaws:
    """The laws of these samples, without single shapes."""
    samples = [each for one in populations for each in one.operators]
    laws = fit_operator_laws(samples)
    return FittedLaws(
        hetplan_version=__version__,
        layers=(),
        links=(),
        populations=(),
        notes=(),
        operators=tuple(map(_without_shapes, laws)),
    )


def _without_shapes(law: OperatorLaw) -> OperatorLaw:
    learned = law.residual
    wider = 1.0 if learned is None else learned.error_before / learned.error_after
    return replace(
        law,
        shapes=(),
        residual=None,
        log_halfwidth=law.log_halfwidth * wider,
        large_log_halfwidth=law.large_log_halfwidth * wider,
    )
