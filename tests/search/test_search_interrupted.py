"""Ctrl-C at any moment: the best plan so far is written, and the journal goes on from there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from numba.core.dispatcher import Dispatcher
from sweep_files import JOB, sweep_files
from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.search.files import load_plan

CONFIGS = Path(__file__).parents[2] / "configs"
_PARTS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Of the calls of a whole search, at which it is interrupted."""

_LAST = range(1, 400, 19)
"""The same, in calls before the end."""


class _Moment:
    """Sends SIGINT at one call of a Python function, counted from the start of the search."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0
        self._began = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if not self._began:
            self._began = frame.f_code.co_name == "_saved"
            return
        if isinstance(frame.f_globals.get(frame.f_code.co_name), Dispatcher):
            return  # compiled code cannot be left through its profiling hook
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _watched(moment: _Moment) -> Iterator[None]:
    sys.setprofile(moment)
    try:
        yield
    finally:
        sys.setprofile(None)


def _plan(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(
        app,
        [
            "plan",
            *("--model", str(folder / "model.yaml")),
            *("--cluster", str(folder / "one.yaml")),
            *("--job", str(folder / "job.yaml")),
            *("--store", str(folder / "store")),
            *("--out", str(folder / "plan.json")),
            *("--journal", str(folder / "journal.jsonl")),
            "--json",
            *options,
        ],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sweep_files(tmp_path)
    asked = JOB.replace("gap: 0.2", "gap: 0.001").replace("pin: {tp: 1, cp: 1,", "pin: {")
    (tmp_path / "job.yaml").write_text(asked)
    (tmp_path / "store").mkdir()
    return tmp_path


def _offers(journal: Path) -> list[float]:
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    return [line["seconds"] for line in lines if line.get("event") == "offer"]


def _at(folder: Path, call: int, whole: bytes) -> str:
    """Interrupt the search at this call and resume it; what was left in between."""
    plan, journal = folder / "plan.json", folder / "journal.jsonl"
    plan.unlink(missing_ok=True)
    journal.unlink(missing_ok=True)
    moment = _Moment(call)
    with _watched(moment):
        done = _plan(folder)
    assert moment.calls >= call
    assert done.exit_code == 130, (call, done.output)
    left = "nothing"
    if plan.exists():
        left = load_plan(plan).certificate.status
        if left == "interrupted":
            found = load_plan(plan).estimate.step_seconds
            assert found <= min(_offers(journal)) * (1 + 1e-9)
        else:
            assert plan.read_bytes() == whole
    else:
        assert not journal.exists() or not _offers(journal)
    if journal.exists():
        again = _plan(folder, "--resume")
        assert again.exit_code == 0, again.output
        assert plan.read_bytes() == whole
    return left


def test_an_interrupt_at_any_call_leaves_the_best_plan_and_a_journal(folder: Path) -> None:
    for _ in range(2):  # the second time everything is imported and compiled
        (folder / "journal.jsonl").unlink(missing_ok=True)
        counted = _Moment(0)
        with _watched(counted):
            done = _plan(folder)
        assert done.exit_code == 0, done.output
    whole = (folder / "plan.json").read_bytes()
    calls = counted.calls
    early = {_at(folder, round(part * calls), whole) for part in _PARTS}
    late = {_at(folder, calls - before, whole) for before in _LAST}
    assert early | late >= {"nothing", "interrupted", "optimal"}
    assert "interrupted" in early


def test_a_signal_from_outside_ends_a_long_search(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    journal, out = tmp_path / "journal.jsonl", tmp_path / "plan.json"
    asked = [
        *(sys.executable, "-m", "hetplan", "plan"),
        *("--model", str(CONFIGS / "models/llama-140b.yaml")),
        *("--cluster", str(CONFIGS / "clusters/mixed-768.yaml")),
        *("--job", str(CONFIGS / "jobs/llama-140b.yaml")),
        *("--store", str(tmp_path / "store"), "--out", str(out), "--journal", str(journal)),
        *("--gap", "0", "--json"),
    ]
    search = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while search.poll() is None and not (journal.exists() and _whole_offers(journal)):
        time.sleep(0.02)
    search.send_signal(signal.SIGINT)
    _, said = search.communicate(timeout=120)
    assert search.returncode == 130, said
    result = load_plan(out)
    assert result.certificate.status == "interrupted"
    assert result.estimate.step_seconds <= min(_whole_offers(journal)) * (1 + 1e-9)


def _whole_offers(journal: Path) -> list[float]:
    data = journal.read_bytes()
    lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    return [line["seconds"] for line in lines if line.get("event") == "offer"]
