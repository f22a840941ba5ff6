"""What all tests share: helper modules, the examples drawn, CPU seconds, and tests that run alone.

Tests draw the same examples on every machine; HETPLAN_RANDOM=1 draws others.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# Helper modules of one room's tests can be imported by the tests of every other one.
sys.path += [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("random" if os.environ.get("HETPLAN_RANDOM") else "same")

_OVER_LIMIT = "over the CPU limit"
CONFIGS = Path(__file__).parents[1] / "configs"
LOCK_FOLDER = "HETPLAN_TEST_LOCKS"
"""Set by the first process of a session for its workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="Name tests, but slow and alone ones, that take more CPU than this in their call: "
        "they should be cheaper, or slow. Kernels are compiled before the first test.",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    os.environ[LOCK_FOLDER] = tempfile.mkdtemp(prefix="hetplan-tests-")
    if config.getoption("--cpu-limit") is not None and not config.getoption("--collect-only"):
        warm_kernels()


def warm_kernels() -> None:
    """Compile the kernels of a large search into the cache on disk, for all workers."""
    files = {
        "model": "models/llama-140b",
        "cluster": "clusters/mixed-768",
        "job": "jobs/llama-140b",
    }
    inputs = [f"--{name}={CONFIGS / file}.yaml" for name, file in files.items()]
    with tempfile.TemporaryDirectory() as folder:
        words = ["plan", *inputs, f"--store={folder}", f"--out={folder}/plan.json", "--gap=0.1"]
        done = subprocess.run(
            [sys.executable, "-m", "hetplan", *words], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise pytest.UsageError(f"the plan that compiles the kernels failed: {done.stderr}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run alone come last, on one worker."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))


def cpu_seconds() -> float:
    """CPU time of this process and of its children that ended, without compilation of kernels."""
    times = os.times()
    used = times.user + times.system + times.children_user + times.children_system
    kernels = sys.modules.get("hetplan.kernels")
    return used if kernels is None else used - (time.monotonic() - kernels.clock())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    limit = item.config.getoption("--cpu-limit")
    before = cpu_seconds()
    result = yield
    exempt = item.get_closest_marker("slow") or item.get_closest_marker("alone")
    used = cpu_seconds() - before
    if limit is not None and used > limit and not exempt:
        # A busy machine makes every test dearer: no failure.
        item.user_properties.append((_OVER_LIMIT, f"{used:.1f} s"))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    over = {
        report.nodeid: seconds
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, seconds in getattr(report, "user_properties", ())
        if name == _OVER_LIMIT
    }
    if over:
        terminalreporter.section("make cheaper, or mark slow (CPU seconds)")
        for test, seconds in sorted(over.items()):
            terminalreporter.line(f"{seconds}  {test}")


@contextmanager
def locked(name: str, how: int) -> Generator[None, None, None]:
    """Hold a lock that all workers of this session share."""
    with open(Path(os.environ[LOCK_FOLDER]) / name, "w") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `alone` waits for the tests of other workers, and they for it."""
    if item.get_closest_marker("alone"):
        with locked("turn", fcntl.LOCK_EX), locked("machine", fcntl.LOCK_EX):
            return (yield)
    with locked("turn", fcntl.LOCK_EX):  # not past a test that waits to be alone
        machine = open(Path(os.environ[LOCK_FOLDER]) / "machine", "w")  # noqa: SIM115
        fcntl.flock(machine, fcntl.LOCK_SH)
    with machine:
        return (yield)
