"""Little time, little memory and closed streams: one line, and nothing that was there is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from command_line import run

from evaluation.limits import MOST_BYTES, answered, cluster_lines, model_text
from evaluation.limits import Question as Random
from hetplan import deadline
from hetplan.cli.main import NO_MEMORY, guarded
from hetplan.deadline import ends_by, moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.search.result import Question
from hetplan.whatif.no_plan import with_reasons

_PLAN = ("plan", "--nodes", "1x8 h100", "--model", "llama-3-8b", "--batch", "64", "--seq", "4096")
"""A question of a second."""


def _hetplan(folder: Path, shell: str, *asked: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell that does something with it, as in `exec "$@" 2>&-`."""
    command = [sys.executable, "-m", "hetplan", *asked, "--out", str(folder / "plan.json")]
    words = ["bash", "-c", shell, "bash", *command]
    return subprocess.run(words, check=False, capture_output=True, text=True)


def _numpy() -> None:
    np.empty(1 << 55)


def _numba() -> None:
    raise MemoryError("Allocation failed (probably too large).")


def _torch() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory")


def _loader() -> None:
    raise ImportError("libx.so: failed to map segment from shared object")


@pytest.mark.parametrize("work", [_numpy, _numba, _torch, _loader])
def test_too_little_memory_is_one_line(
    work: typer.models.CommandFunctionType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        guarded(work)()
    assert ended.value.exit_code == LimitError.exit_code
    assert capsys.readouterr().err == f"hetplan: {NO_MEMORY}\n"


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_nobodys_business(closed: str, tmp_path: Path) -> None:
    done = _hetplan(
        tmp_path, f'exec "$@" {closed}>&-', *_PLAN, "--time-limit", "60 s", "--gap", "0.9"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").read_text().startswith("{")
    assert "Error" not in done.stdout + done.stderr


def test_little_address_space_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "plan.json"
    kept.write_text("")
    done = _hetplan(tmp_path, 'ulimit -v 300000; exec "$@"', *_PLAN)
    assert done.returncode == LimitError.exit_code
    assert done.stderr.splitlines()[-1] == f"hetplan: {NO_MEMORY}"
    assert "Traceback" not in done.stderr
    assert kept.read_text() == ""


@pytest.mark.slow  # two processes without compiled kernels on disk: 8 s of CPU
def test_few_files_no_home_one_core_and_a_full_disk_lose_nothing(tmp_path: Path) -> None:
    asked = (*_PLAN, "--time-limit", "60 s", "--gap", "0.9")
    little = (
        'ulimit -n 64; export HOME=/proc/nowhere XDG_CACHE_HOME=; exec taskset -c "$(core)" "$@"'
    )
    one_core = 'core() { taskset -cp $$ | sed "s/.*: //; s/[-,].*//"; }; '
    done = _hetplan(tmp_path, one_core + little, *asked)
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "plan.json"
    kept = plan.read_bytes()
    full = _hetplan(tmp_path, 'ulimit -f 1; exec "$@"', *asked)
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == f"hetplan: cannot write {plan}: File too large"
    assert plan.read_bytes() == kept
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def _asked(layers: int, islands: int, nodes: int, target: str, limit_seconds: int) -> Random:
    """A question of so many layers on islands of three kinds."""
    names = [
        ("nvidia-a100-80gb-sxm", "nvidia-h100-80gb-sxm", "amd-mi300x")[at % 3]
        for at in range(islands)
    ]
    return Random(
        seed=0,
        islands=islands,
        kinds=min(3, islands),
        devices=islands * nodes * 8,
        layers=layers,
        batch=1024,
        target=target,
        limit_seconds=limit_seconds,
        model=model_text(layers, 1024),
        cluster="\n".join(cluster_lines(names, nodes, 2)) + "\n",
    )


@pytest.mark.slow  # up to 15 s of CPU each
@pytest.mark.parametrize("target", ["megatron", "native"])
@pytest.mark.parametrize("limit_seconds", [2, 10])
def test_3000_layers_keep_their_limits(target: str, limit_seconds: int) -> None:
    found = answered(_asked(3000, 3, 32, target, limit_seconds))
    assert found["ended"] in ("plan", "not in time")
    # Twice what is allowed, in CPU seconds.
    assert float(str(found["overrun_seconds"])) <= 2 * float(str(found["allowed_seconds"]))
    assert float(str(found["peak_memory_bytes"])) <= MOST_BYTES


def test_65_islands_are_refused_in_one_line(tmp_path: Path) -> None:
    done = run(*_asked(32, 65, 1, "megatron", 5).words(tmp_path))
    assert done.exit_code == InputError.exit_code
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("hetplan: ")]
    assert "leave 65 islands" in line
    assert "at most 60 are searched" in line
    assert "fault" not in line


def test_no_time_at_all_is_one_line(tmp_path: Path) -> None:
    done = _hetplan(tmp_path, 'exec "$@"', *_PLAN, "--time-limit", "1 us")
    assert done.returncode == LimitError.exit_code
    assert done.stderr.splitlines()[-1].startswith("hetplan: the time limit ")
    assert not (tmp_path / "plan.json").exists()


def test_reasons_have_no_more_time_than_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "LATE_SECONDS", 0.0)

    def unending(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr("hetplan.whatif.no_plan._demands", unending)
    question: Question = None  # type: ignore[assignment]  # nobody looks at it
    with (
        pytest.raises(InfeasibleError) as ended,
        with_reasons(question, None, moment_in(0.05)),  # type: ignore[arg-type]
    ):
        raise InfeasibleError(["no plan"])
    assert str(ended.value).startswith("left out for the time limit: ")


def test_a_moment_that_is_over_leaves_reasons_out() -> None:
    with (
        pytest.raises(InfeasibleError, match="left out for the time limit"),
        ends_by(moment_in(-0.1)),
        with_reasons(None, None),  # type: ignore[arg-type]
    ):
        raise InfeasibleError(["no plan"])
