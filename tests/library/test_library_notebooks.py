"""The notebooks of docs run from their first cell to their last, and show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from notebook_cells import DOCS, WITH_OUTPUTS, code_cells, run_cells, text_of
from test_house_docs import same_line

MEASURING = DOCS / "profile-to-run.ipynb"
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):  # no profiles of the tester's own
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow  # plans five times: 30 s of CPU
def test_a_cluster_of_which_nothing_is_measured(tmp_path: Path) -> None:
    shown = text_of(run_cells(WITH_OUTPUTS))
    stored = text_of([cell["outputs"] for cell in code_cells(WITH_OUTPUTS)])
    assert len(stored) == len(shown) > 30
    for old, new in zip(stored, shown, strict=True):
        assert same_line(old, new), f"the notebook has {old!r}, now it is {new!r}: run `make docs`"
    assert "<html" in (tmp_path / "report.html").read_text()[:500]
    assert json.loads((tmp_path / "plan.json").read_text())["schema"].startswith("hetplan.plan/")


@pytest.mark.slow  # measures, and trains in two processes: 40 s of CPU
def test_from_a_profile_to_a_running_job() -> None:
    pytest.importorskip("torch")
    shown = "\n".join(text_of(run_cells(MEASURING)))
    assert "predicted from measured figures" in shown
    assert re.search(r"^loss \S+ at step 1, \S+ at step 8$", shown, re.MULTILINE)
    assert ", measured " in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_whole_and_outputs_are_small(path: Path) -> None:
    """Notebook form 4.5, with a name for every cell; outputs only where a test compares them."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in document["cells"]]
    assert len({*ids}) == len(ids)
    assert document["cells"][0]["source"][0].startswith("# ")
    assert any(cell["outputs"] for cell in code_cells(path)) == (path == WITH_OUTPUTS)
    assert path.stat().st_size < 60_000
    text = "".join(line for cell in document["cells"] for line in cell["source"])
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS / link).exists(), f"{path.name} links to {link}"
    for cell in code_cells(path):
        compile("".join(cell["source"]), path.name, "exec")
