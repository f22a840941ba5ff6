"""A kernel gives the same whether it runs in Python or compiled, and is compiled once."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetplan import kernels
from hetplan.errors import OutOfTimeError
from hetplan.interrupts import held, interrupts_wait
from hetplan.kernels import Kernel, clock, kernel, order_of, sum_of
from hetplan.search.solver import Best

CONFIGS = Path(__file__).parents[2] / "configs"


@kernel
def doubled(value: float) -> float:
    return 2.0 * value


@kernel
def raise_all(values: npt.NDArray[np.float64], times: int) -> tuple[float, bool]:
    """Double every value so many times, in place."""
    last = 0.0
    for _ in range(times):
        for at in range(values.shape[0]):
            values[at] = doubled(values[at])
            last = values[at]
    return last, last > values[0]


def fresh(made: Kernel[..., Any]) -> Kernel[..., Any]:
    """The kernel as it is at the start of a process."""
    return Kernel(made.function)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path / "hetplan"


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(kernels.loading, "now", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_a_short_call_compiles_nothing_and_returns_plain_numbers(own_folder: Path) -> None:
    values = np.array([1.0, 3.0])
    found = fresh(raise_all)(values, 3)
    assert found == (24.0, True)
    assert [type(each) for each in found] == [float, bool]
    assert values.tolist() == [8.0, 24.0]
    assert not own_folder.exists()


def test_a_long_call_is_compiled_and_starts_from_the_values_it_was_given(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "MAX_INTERPRETED", 10)
    one = fresh(raise_all)
    for _ in range(2):
        values = np.array([1.0, 3.0])
        assert one(values, 20) == (3.0 * 2**20, True)
        assert values.tolist() == [2.0**20, 3.0 * 2**20]
    kept = {path.name.split("-")[0].rpartition(".")[2] for path in own_folder.iterdir()}
    assert kept == {"raise_all", "doubled"}
    assert sum("compiling kernels" in each.message for each in caplog.records) <= 1

    # The next process loads it; a file that was cut off is compiled again.
    for path in own_folder.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert fresh(raise_all)(np.array([1.0, 3.0]), 20) == (3.0 * 2**20, True)


class Touch:
    """Unpickled, it makes a file: a kernel on disk is code that runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(("mode", "runs"), [(0o600, True), (0o620, False), (0o602, False)])
def test_a_kernel_that_others_could_have_written_is_not_loaded(
    own_folder: Path, mode: int, runs: bool
) -> None:
    fresh(doubled).compile()(1.0)
    (path,) = own_folder.iterdir()
    path.write_bytes(pickle.dumps(Touch(own_folder.parent / "ran")))
    path.chmod(mode)
    assert fresh(doubled).compile()(2.0) == 4.0
    assert (own_folder.parent / "ran").exists() == runs


def test_without_a_folder_to_write_every_process_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.devnull)
    compiled = fresh(doubled).compile()
    assert compiled(2.0) == 4.0


def kernel_of(text: str, **scope: object) -> Kernel[..., Any]:
    exec(f"def made(x):\n    return {text}", scope)
    return Kernel(scope["made"])  # type: ignore[arg-type]


def test_the_fingerprint_covers_code_constants_and_callees() -> None:
    def caller(callee: str, limit: int) -> str:
        return kernel_of("f(x) + LIMIT", f=kernel_of(callee), LIMIT=limit).fingerprint

    assert caller("x + 1", 3) == caller("x + 1", 3)
    assert len({caller("x + 1", 3), caller("x + 2", 3), caller("x + 1", 4)}) == 3


def test_old_versions_on_disk_are_removed(own_folder: Path) -> None:
    own_folder.mkdir()
    for age in range(6):
        path = own_folder / f"a.kernel-types-{age}.kernel"
        path.touch()
        os.utime(path, (1000 + age, 1000 + age))
    kernels._Disk(doubled)._sweep(path)
    assert sorted(each.name for each in own_folder.iterdir()) == [
        f"a.kernel-types-{age}.kernel" for age in (2, 3, 4, 5)
    ]


@pytest.mark.slow
def test_compiling_does_not_count_against_a_time_limit(
    time_passes: Callable[[float], None],
) -> None:
    compiler = kernels._compiler()
    best = Best(gap=0.0, bounds=[], deadline=clock() + 5.0, progress=None, started=clock())
    compiler._begin()
    time_passes(500.0)
    compiler._begin()  # a callee
    time_passes(500.0)
    compiler._end()
    compiler._end()
    best.check_time()
    time_passes(4.0)
    best.check_time()
    time_passes(2.0)
    with pytest.raises(OutOfTimeError):
        best.check_time()


def test_sums_and_orders_are_those_of_a_loop() -> None:
    random = np.random.default_rng(0)
    for size in range(40):
        values = np.round(random.random(size) * 8) / 3
        assert sum_of(values) == reduce(add, values.tolist(), 0.0)
        assert order_of(values).tolist() == sorted(range(size), key=values.tolist().__getitem__)


@pytest.mark.slow
def test_a_search_gives_the_same_in_python_and_compiled(tmp_path: Path) -> None:
    plans = []
    for way in ("compile_at_once()", "MAX_INTERPRETED = kernels.MAX_INTERPRETED_CACHED = 10**12"):
        out = tmp_path / f"{len(plans)}.json"
        words = [
            "plan",
            *("--model", CONFIGS / "models" / "gpt-tiny.yaml"),
            *("--cluster", CONFIGS / "clusters" / "this-machine.yaml"),
            *("--job", CONFIGS / "jobs" / "gpt-tiny.yaml"),
            *("--out", out),
        ]
        code = (
            "import sys; from hetplan import kernels; from hetplan.cli.main import main\n"
            f"kernels.{way}\n"
            f"sys.argv = {['hetplan', *map(str, words)]}\nmain()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        plans.append(out.read_bytes())
    assert plans[0] == plans[1]


@pytest.fixture
def _python_interrupts() -> Iterator[None]:
    """Python's own handler: a run in the background of a script ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_interrupts")
def test_an_interrupt_waits_until_a_kernel_has_returned() -> None:
    ended = []

    def compiled() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(True)

    made = fresh(doubled)
    made._compiled = compiled
    with interrupts_wait():
        with pytest.raises(KeyboardInterrupt):
            made()
        assert len(ended) == 1
        # Between kernels, and a second time within one, it does not wait.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with held:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_python_interrupts")
def test_an_interrupt_in_a_finalizer_comes_again() -> None:
    """Python prints what is raised there, and goes on."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        Finalized()
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        work()


def test_a_clock_of_cpu_seconds_stands_still_while_the_process_sleeps() -> None:
    program = (
        "import time\n"
        "from hetplan.kernels import clock, count_cpu_seconds\n"
        "count_cpu_seconds()\n"
        "began = clock()\n"
        "time.sleep(0.5)\n"
        "print(clock() - began)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert 0.0 <= float(done.stdout) < 0.25
