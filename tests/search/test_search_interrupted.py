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
from counted_steps import in_kernel
from sweep_files import JOB, sweep_files
from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.kernels import Kernel
from hetplan.search.files import load_legal_plan

CONFIGS = Path(__file__).parents[2] / "configs"
_MOMENTS = [
    ("any", 300),
    ("any", 10_000),
    ("_order_free", 1),
    ("offer", 1),
    # From here on there is a plan.
    ("any", 60_000),
    ("on_event", 1),
    ("report", 2),
    ("_put", 4),
    ("done", 2),
    ("final_plan", 1),
    ("_result", 1),
    ("close", 1),
    ("by_objective", 1),
    ("save_result", 1),
    ("write_atomically", 1),
    ("emit", 1),
]
"""(Python function, its how manieth call since the search began) at which SIGINT comes."""


class _Moment:
    """Sends SIGINT at one of these."""

    def __init__(self, name: str, call: int) -> None:
        self.name = name
        self.left = call
        self._began = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.left:
            return
        name = frame.f_code.co_name
        if not self._began:
            self._began = name == "planned"
        elif self.name in ("any", name):
            if in_kernel(frame) or isinstance(frame.f_globals.get(name), Kernel):
                return  # compiled code cannot be left through its profiling hook
            self.left -= 1
            if not self.left:
                signal.raise_signal(signal.SIGINT)


@contextmanager
def _watched(moment: _Moment) -> Iterator[None]:
    # A run in the background of a script is started with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(moment)
    try:
        yield
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)


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


def _files(folder: Path) -> Path:
    sweep_files(folder)
    asked = JOB.replace("gap: 0.2", "gap: 0.001").replace("pin: {tp: 1, cp: 1,", "pin: {")
    (folder / "job.yaml").write_text(asked)
    (folder / "store").mkdir()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The plan of a search that nobody stopped."""
    folder = _files(tmp_path_factory.mktemp("whole"))
    done = _plan(folder)
    assert done.exit_code == 0, done.output
    return (folder / "plan.json").read_bytes()


@pytest.mark.parametrize(("name", "call"), _MOMENTS)
def test_an_interrupt_leaves_the_best_plan_and_a_journal(
    name: str, call: int, tmp_path: Path, whole: bytes
) -> None:
    folder = _files(tmp_path)
    plan, journal = folder / "plan.json", folder / "journal.jsonl"
    moment = _Moment(name, call)
    with _watched(moment):
        done = _plan(folder)
    assert moment.left == 0
    assert done.exit_code == 130, done.output
    found = plan.exists()
    assert found == bool(_whole_offers(journal) or name == "on_event")
    assert found == ((name, call) not in _MOMENTS[:4])
    if found and name == "emit":
        assert plan.read_bytes() == whole
    elif found:
        result = load_legal_plan(plan)
        assert result.certificate.status == "interrupted"
        assert result.estimate.step_seconds <= min(_whole_offers(journal), default=1) * (1 + 1e-9)
    again = _plan(folder, *(["--resume"] if journal.exists() else []))
    assert again.exit_code == 0, again.output
    assert plan.read_bytes() == whole


def test_a_solver_leaves_the_signal_to_python() -> None:
    program = """
import os, signal
from hetplan.cluster.load import load_cluster
from hetplan.search.multi_pipeline.heuristic import most_sequences
signal.signal(signal.SIGINT, signal.default_int_handler)
cluster = load_cluster(CLUSTER)
most_sequences((), cluster, most_pipelines=1, effort=0.1)
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("heard")
"""
    cluster = str(CONFIGS / "clusters/two-regions.yaml")
    done = subprocess.run(
        [sys.executable, "-c", program.replace("CLUSTER", repr(cluster))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


@pytest.mark.slow
def test_a_signal_from_outside_ends_a_long_search(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    journal, out = tmp_path / "journal.jsonl", tmp_path / "plan.json"
    asked = [
        *(sys.executable, "-m", "hetplan", "plan"),
        *("--model", str(CONFIGS / "models/llama-140b.yaml")),
        *("--cluster", str(CONFIGS / "clusters/mixed-768.yaml")),
        *("--job", str(CONFIGS / "jobs/llama-140b.yaml"), "--target", "native"),
        *("--store", str(tmp_path / "store"), "--out", str(out), "--journal", str(journal)),
        *("--gap", "0", "--json"),
    ]
    # A run in the background of a script hands its ignored signal on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    search = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    while search.poll() is None and not _whole_offers(journal):
        time.sleep(0.02)
    search.send_signal(signal.SIGINT)
    _, said = search.communicate(timeout=120)
    assert search.returncode == 130, said
    result = load_legal_plan(out)
    assert result.certificate.status == "interrupted"
    assert result.estimate.step_seconds <= min(_whole_offers(journal)) * (1 + 1e-9)


def _whole_offers(journal: Path) -> list[float]:
    data = journal.read_bytes() if journal.exists() else b""
    lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    return [line["seconds"] for line in lines if line.get("event") == "offer"]
