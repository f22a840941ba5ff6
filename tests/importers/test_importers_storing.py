"""Imported samples in a store: nothing twice unasked, everything with its provenance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from importers_golden_inputs import golden_inputs

from hetplan.errors import InputError
from hetplan.importers.kinds import KINDS
from hetplan.importers.records import Imported
from hetplan.importers.storing import ImportFacts, store_imported
from hetplan.profiling.samples import LayerSample, LinkSample
from hetplan.profiling.store import read_populations

FACTS = ImportFacts(
    device="h100-sxm",
    backend="cuda",
    measured_on="2026-03-04",
    command="hetplan import nccl-tests run.log",
)
LAYER = LayerSample(
    device="a100",
    architecture="gpt",
    layer="transformer",
    phase="forward",
    precision="bfloat16",
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=50304,
    sequence_length=2048,
    microbatch_size=2,
    tp=1,
    median_seconds=0.0021,
    p10_seconds=0.0021,
    p90_seconds=0.0021,
    repeats=1,
    outliers=0,
    steady=True,
    activation_bytes=0.0,
    peak_memory_bytes=0.0,
    clock_hertz=0.0,
)


def imported(kind: str, name: str) -> Imported:
    entry = next(each for each in KINDS if each.kind == kind)
    return next(each for each in golden_inputs(entry) if each.path.name == name).read()


def dated(read: Imported) -> tuple[LinkSample, ...]:
    return tuple(replace(each, measured_on=FACTS.measured_on) for each in read.links)


def test_samples_come_back_with_their_provenance(tmp_path: Path) -> None:
    read = imported("nccl-tests", "all-reduce-two-nodes.txt")
    stored = store_imported(read, tmp_path, FACTS)
    assert (stored.links_added, stored.links_there, stored.layers_added) == (4, 0, 0)
    (population,) = read_populations(tmp_path)
    assert population.links == dated(read)
    (provenance,) = population.provenance
    assert provenance.tool == "nccl-tests 2.17.8, NCCL 2.28.5"
    assert provenance.device_name == "NVIDIA H100 80GB HBM3"
    assert provenance.measured_on == "2026-03-04"
    assert "means over a run's iterations" in provenance.notes
    assert stored.folders == (str(next(tmp_path.rglob("links.csv")).parent),)


def test_the_same_again_only_when_asked(tmp_path: Path) -> None:
    read = imported("rccl-tests", "two-cycles.txt")  # two equal rows, from two cycles
    assert store_imported(read, tmp_path, FACTS).links_added == 2
    second = store_imported(read, tmp_path, FACTS)
    assert (second.links_added, second.links_there) == (0, 2)
    third = store_imported(read, tmp_path, FACTS, again=True)
    assert (third.links_added, third.links_there) == (2, 0)
    (population,) = read_populations(tmp_path)
    assert population.links == dated(read) * 2


def test_a_longer_file_adds_what_is_new(tmp_path: Path) -> None:
    read = imported("nccl-tests", "six-programs-2022.txt")
    store_imported(replace(read, links=read.links[:4]), tmp_path, FACTS)
    stored = store_imported(read, tmp_path, FACTS)
    assert (stored.links_added, stored.links_there) == (7, 4)
    (population,) = read_populations(tmp_path)
    assert sorted(map(repr, population.links)) == sorted(map(repr, dated(read)))


def test_other_circumstances_are_another_population(tmp_path: Path) -> None:
    read = imported("nccl-tests", "unnamed.txt")
    store_imported(read, tmp_path, FACTS)
    store_imported(read, tmp_path, replace(FACTS, driver="570.86"))
    store_imported(read, tmp_path, replace(FACTS, measured_on="2026-03-05"))
    counts = [len(population.links) for population in read_populations(tmp_path)]
    assert sorted(counts) == [len(read.links), 2 * len(read.links)]


def test_layers_go_to_their_device(tmp_path: Path) -> None:
    read = Imported(kind="sailor", layers=(LAYER, replace(LAYER, device="v100")))
    stored = store_imported(read, tmp_path, FACTS)
    assert (stored.layers_added, stored.links_added, len(stored.folders)) == (2, 0, 2)
    assert store_imported(read, tmp_path, FACTS).layers_there == 2
    assert {each.layers[0].device for each in read_populations(tmp_path)} == {"a100", "v100"}


@pytest.mark.parametrize("day", ["", "yesterday", "2026-13-01", "2026-02-30\n"])
def test_a_date_that_is_none_is_refused(tmp_path: Path, day: str) -> None:
    read = imported("nccl-tests", "unnamed.txt")
    with pytest.raises(InputError, match="measured_on is"):
        store_imported(read, tmp_path, replace(FACTS, measured_on=day))


def test_nothing_to_store_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hostfile gave no sample"):
        store_imported(Imported(kind="hostfile"), tmp_path, FACTS)
    bad = imported("nccl-tests", "unnamed.txt")
    bad = replace(bad, links=tuple(replace(each, link="../x") for each in bad.links))
    with pytest.raises(InputError, match="names a folder"):
        store_imported(bad, tmp_path, FACTS)
