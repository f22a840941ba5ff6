"""The unit data of a folder of reference data as populations that a fit takes.

    unit/layer_times.csv       operators: Aceso's profiler on six devices (unit_operators)
    unit/gemm_efficiency.csv   operators: SimuMax's products and attention (unit_products)
    unit/collectives.csv       links: collectives by size, ranks and nodes (unit_collectives)
    sailor/layer_profiles      whole layers, float32 (unit_layers)

Nothing is invented: a row that its source or the folder's README marks as wrong is not used and is
counted in the notes under its reason. A file that is not there is a note, a file that is damaged an
error: so any other folder in the same forms can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.unit_collectives import (
    GALVATRON_NODE,
    GALVATRON_NODES,
    SAILOR_A100_NODES,
    SAILOR_GH200_NODES,
    SAILOR_NODES,
    VTRAIN_A100_NODE,
    VTRAIN_V100_NODE,
    node_link,
    nodes_link,
    read_collectives,
)
from evaluation.accuracy.unit_layers import read_layers
from evaluation.accuracy.unit_notes import Notes
from evaluation.accuracy.unit_operators import read_operators
from evaluation.accuracy.unit_products import read_products
from hetplan.errors import InputError
from hetplan.profiling.samples import ProfileSet

__all__ = [
    "GALVATRON_NODE",
    "GALVATRON_NODES",
    "SAILOR_A100_NODES",
    "SAILOR_GH200_NODES",
    "SAILOR_NODES",
    "VTRAIN_A100_NODE",
    "VTRAIN_V100_NODE",
    "UnitData",
    "node_link",
    "nodes_link",
    "read_unit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitData:
    """Everything that a folder's unit data say of single operators, layers and links."""

    populations: tuple[ProfileSet, ...]
    """Each with one provenance; of two of one device and precision the first is the better one."""
    notes: tuple[str, ...]
    """Rows that are not used, counted by reason, and what a reader of the others must know."""


def read_unit(folder: Path) -> UnitData:
    """The populations of a reference folder; an InputError with file and line for wrong rows.

    `folder` holds `unit/` and `sailor/`; what of them is missing is noted.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name a folder of reference data")
    notes = Notes()
    collectives = read_collectives(folder, notes)
    links = [sample for population in collectives for sample in population.links]
    populations = (
        *read_operators(folder, notes),
        *read_products(folder, notes),
        *collectives,
        *read_layers(folder, notes, links),
    )
    return UnitData(populations=populations, notes=notes.lines())
