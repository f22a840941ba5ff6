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
