"""The verb `import_file`: the format is detected, or named and then checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from importers_golden_inputs import FOLDER

import hetplan
from hetplan.errors import InputError
from hetplan.importers.table import Gives, import_text


def test_the_verb_reads_a_file_of_a_kind_or_detects_it() -> None:
    path = FOLDER / "nvidia-topo" / "a100-8.txt"
    imported = hetplan.import_file("nvidia-topo", path)
    assert imported.topology is not None
    assert len(imported.topology.nics) == 5
    assert hetplan.import_file(None, path) == imported


def test_link_samples_are_named_by_the_user_or_after_the_file() -> None:
    log = FOLDER / "nccl-tests" / "all-reduce-two-nodes.txt"
    links = hetplan.import_file("nccl-tests", str(log), link="x").links
    assert {each.link for each in links} == {"x"}
    named = hetplan.import_file("nccl-tests", log)
    assert {each.link for each in named.links} == {"all-reduce-two-nodes"}
    assert "named all-reduce-two-nodes after the file" in named.notes[-1]
    with pytest.raises(InputError, match="cannot be printed"):
        hetplan.import_file("nccl-tests", log, link="a\x1b[31m")


def test_unknown_and_wrong_kinds_are_named() -> None:
    with pytest.raises(InputError, match="nccl-tests"):
        hetplan.import_file("nccl_tests", FOLDER / "nccl-tests" / "unnamed.txt")
    with pytest.raises(InputError, match="looks like nvidia-topo"):
        hetplan.import_file("perftest", FOLDER / "nvidia-topo" / "a100-8.txt")
    with pytest.raises(InputError, match="no such file"):
        hetplan.import_file(None, Path("nowhere"))
    with pytest.raises(InputError, match="no tool is recognised"):
        import_text("some words\nand more\n", "f", gives=(Gives.LINKS,))
    with pytest.raises(InputError, match="hetplan import links"):
        import_text(" #bytes     #iterations   x = ?\n", "f", gives=(Gives.HOSTS,))


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("node1\nnode2\n", "slurm-nodes", 2),
        ("node[1-3]", "slurm-nodes", 3),
        ("a slots=8\n", "hostfile", 1),
        ("a:8\nb:8\n", "hostfile", 2),
    ],
)
def test_lists_of_hosts_are_detected(text: str, kind: str, count: int) -> None:
    imported = import_text(text, "f", gives=(Gives.HOSTS,))
    assert (imported.kind, len(imported.hosts)) == (kind, count)
