"""Imported samples in a store: nothing twice unasked, everything with its provenance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from importers_golden_inputs import GOLDEN_INPUTS

from hetplan.importers.records import Imported
from hetplan.importers.storing import import_provenance, store_imported
from hetplan.profiling.samples import LinkSample, Provenance
from hetplan.profiling.store import read_populations


def provenance(read: Imported, **changes: str) -> Provenance:
    """Where the samples come from."""
    values = {"device": "h100-sxm", "measured_on": "2026-03-04"} | changes
    return import_provenance(Path("run.log"), read, **values)


def imported(kind: str, name: str) -> Imported:
    paths = {(each.importer.kind, each.path.name): each for each in GOLDEN_INPUTS}
    return paths[kind, name].read()


def dated(read: Imported) -> tuple[LinkSample, ...]:
    return tuple(replace(each, measured_on="2026-03-04") for each in read.links)


def test_samples_come_back_with_their_provenance(tmp_path: Path) -> None:
    read = imported("nccl-tests", "all-reduce-two-nodes.txt")
    stored = store_imported(read, tmp_path, provenance(read))
    assert (stored.added, stored.already_there) == (4, 0)
    (population,) = read_populations(tmp_path)
    assert population.links == dated(read)
    (found,) = population.provenance
    assert found.tool == "nccl-tests 2.17.8, NCCL 2.28.5"
    assert found.device_name == "NVIDIA H100 80GB HBM3"
    assert found.measured_on == "2026-03-04"
    assert "means over a run's iterations" in found.notes
    assert stored.folders == (str(next(tmp_path.rglob("links.csv")).parent),)


def test_the_same_again_only_when_asked(tmp_path: Path) -> None:
    read = imported("rccl-tests", "two-cycles.txt")  # two equal rows, from two cycles
    assert store_imported(read, tmp_path, provenance(read)).added == 2
    second = store_imported(read, tmp_path, provenance(read))
    assert (second.added, second.already_there) == (0, 2)
    third = store_imported(read, tmp_path, provenance(read), again=True)
    assert (third.added, third.already_there) == (2, 0)
    (population,) = read_populations(tmp_path)
    assert population.links == dated(read) * 2
