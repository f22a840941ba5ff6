"""The verb `import_file`, and what a text is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest
from importers_golden_inputs import EVERY_INPUT, FOLDER, GoldenInput

import hetplan
from hetplan.errors import InputError
from hetplan.importers.looks_like import looks_like
from hetplan.importers.open import guessed
from hetplan.importers.records import ImportContext
from hetplan.job.spec import Precision

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "llama-2-7b.yaml"


@pytest.mark.parametrize("golden", EVERY_INPUT, ids=lambda golden: golden.name)
def test_no_output_is_taken_for_another(golden: GoldenInput) -> None:
    assert looks_like(golden.text) in (golden.kind.kind, None)


def test_the_verb_reads_a_file() -> None:
    path = FOLDER / "nvidia-topo" / "a100-8.txt"
    imported = hetplan.import_file("nvidia-topo", path)
    assert imported.topology is not None
    assert len(imported.topology.nics) == 5
    logs = FOLDER / "nccl-tests" / "all-reduce-two-nodes.txt"
    assert {each.link for each in hetplan.import_file("nccl-tests", str(logs), link="x").links} == {
        "x"
    }
    named = hetplan.import_file("nccl-tests", logs)
    assert {each.link for each in named.links} == {"all-reduce-two-nodes"}
    assert "named all-reduce-two-nodes after the file" in named.notes[-1]


def test_the_verb_takes_a_model_and_precisions_by_name_or_value() -> None:
    path = FOLDER / "nvidia-topo" / "single.txt"
    for precision in ("bfloat16", Precision.BFLOAT16):
        read = hetplan.import_file("nvidia-topo", path, model=MODEL, precision=precision)
        assert read.topology is not None
    with pytest.raises(InputError, match="bfloat16"):
        hetplan.import_file("nvidia-topo", path, precision="bf17")
    with pytest.raises(InputError, match="no such file"):
        hetplan.import_file("nvidia-topo", path, model="nowhere.yaml")


def test_missing_context_and_unknown_kinds_are_named() -> None:
    with pytest.raises(InputError, match="nccl-tests"):
        hetplan.import_file("nccl_tests", "any.txt")
    with pytest.raises(InputError, match="known: nccl-tests"):
        hetplan.import_file("qqqq", "any.txt")


def test_hosts_are_guessed_with_and_without_signs() -> None:
    among = ("hostfile", "slurm-nodes")
    for text, kind, count in (
        ("node1\nnode2\n", "hostfile", 2),
        ("node[1-3]", "slurm-nodes", 3),
        ("a slots=8\n", "hostfile", 1),
    ):
        read = guessed(text, ImportContext(file="f"), among)
        assert (read.kind, len(read.hosts)) == (kind, count)
    with pytest.raises(InputError, match="looks like perftest"):
        guessed(" #bytes     #iterations   x = ?\n", ImportContext(file="f"), among)
