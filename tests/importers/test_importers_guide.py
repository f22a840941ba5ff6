"""docs/clusters.md and docs/importing.md say what is so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cluster_page import EXAMPLES, PAGE, output, shown_files, shown_runs

from hetplan.cluster.load import load_cluster

REFRESH = "run `python tests/importers/cluster_page.py` and read what it changed"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: the example files, and nothing of whoever runs the tests."""
    for path in EXAMPLES.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_the_files_are_shown_as_they_are() -> None:
    shown = shown_files(PAGE.read_text(encoding="utf-8"))
    assert len(shown) >= 2
    for name, content in shown:
        assert content.rstrip("\n") == (EXAMPLES / name).read_text().rstrip("\n"), REFRESH


def test_the_commands_print_what_is_shown_and_their_clusters_load(folder: Path) -> None:
    runs = shown_runs(PAGE.read_text(encoding="utf-8"))
    assert len(runs) >= 6
    for command, shown in runs:
        assert output(command) == shown, f"{command}: {REFRESH}"
    for name, devices in (("mine", 128), ("two-regions", 40)):
        assert load_cluster(folder / name / "cluster.yaml").num_devices == devices
