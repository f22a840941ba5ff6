"""Whenever a host's script is told to end, nothing of it is left and nothing is cut short."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scheduler_sheets import clean_environment, emitted, free_port, launch, loopback, write

from hetplan.emitters.schedulers import scheduled_files
from hetplan.emitters.trainer_launch import EmitOptions

SOON = 60.0
TORCHRUN = """#!/usr/bin/env bash
# In place of python3: barrier.py passes at once, torchrun starts one rank in a session of its own.
echo $$ >> "$WHERE/pids"
[[ $1 == -m ]] || exec sleep "${BARRIER_SECONDS:-0}"
trap 'echo torchrun >> "$WHERE/told"; [[ -z $RANK_SECONDS ]] || wait "$!"' TERM
if [[ -n $RANK_SECONDS ]]; then
  setsid bash -c 'trap "echo rank >> \\"$WHERE/told\\"; told=yes" TERM
    echo $$ >> "$WHERE/pids"; touch "$WHERE/runs"
    while [[ -z $told ]]; do sleep 0.1; done
    end=$((SECONDS + RANK_SECONDS))
    while ((SECONDS < end)); do sleep 0.1; done; touch "$WHERE/saved"' &
  wait "$!"
  wait "$!"
  exit 1
fi
trap '' TERM
touch "$WHERE/runs"
exec sleep 500
"""


def fake(folder: Path, **more: object) -> tuple[Path, Path]:
    """An emitted folder, and what stands for python3 in it."""
    of = loopback(free_port(), 1)
    program = folder / "python"
    program.write_text(TORCHRUN)
    program.chmod(0o755)
    options = EmitOptions(python=str(program), trainer_folder=str(folder))
    made = launch(of, program=("train.py",), arguments=(), **more)
    return write(folder / "launch", scheduled_files(of, made, options)), program


def begin(script: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", script, *words],
        env=clean_environment(WHERE=str(script.parents[1]), **more),
        stderr=subprocess.PIPE,
        text=True,
    )


def living(folder: Path) -> list[int]:
    """Processes that were started and run."""
    if not (folder / "pids").exists():
        return []
    found = []
    for text in (folder / "pids").read_text().split():
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0]
            found += [int(text)] if state != "Z" else []
    return found


def wait_for(path: Path) -> None:
    end = time.monotonic() + SOON
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path):
    yield
    for pid in (each for folder in (tmp_path, *tmp_path.iterdir()) for each in living(folder)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", [r"*\$!*", r"children?position?=*"])
def test_a_process_that_was_just_started_is_ended(tmp_path, moment):
    # The signal comes where the process is there and the script has not kept its number.
    folder, _ = fake(tmp_path)
    hook = tmp_path / "hook.sh"
    hook.write_text(
        f"set -T; trap 'case $BASH_COMMAND in {moment}) trap - DEBUG; kill -TERM $$ ;; esac' DEBUG"
    )
    barrier = "0" if "position" in moment else "500"
    script = begin(
        folder / "start-here.sh",
        "alpha",
        BASH_ENV=str(hook),
        BARRIER_SECONDS=barrier,
        HETPLAN_GRACE_SECONDS="30",
    )
    began = time.monotonic()
    said = script.communicate(timeout=SOON)[1]
    assert script.returncode == 143, said
    # Told, not killed when the time is over.
    assert time.monotonic() - began < 25, said
    assert not living(tmp_path)
    assert not list((folder / "logs").glob("*.pid"))


def test_ranks_may_end_what_they_do_and_a_launcher_alone_may_not(tmp_path):
    slow, stuck = tmp_path / "slow", tmp_path / "stuck"
    slow.mkdir()
    stuck.mkdir()
    scripts = [
        begin(fake(slow)[0] / "start-here.sh", "alpha", RANK_SECONDS="8"),
        begin(fake(stuck)[0] / "start-here.sh", "alpha", HETPLAN_GRACE_SECONDS="500"),
    ]
    for folder, script in zip((slow, stuck), scripts, strict=True):
        wait_for(folder / "runs")
        script.send_signal(signal.SIGTERM)
    for script in scripts:
        said = script.communicate(timeout=SOON)[1]
        assert script.returncode == 143, said
    assert (slow / "saved").exists()
    told = (slow / "told").read_text().split()
    # torchrun ends its ranks when it is told twice; a rank that saves passes over it.
    assert told.count("torchrun") == 1
    assert told.count("rank") >= 1
    assert not living(slow)
    assert not living(stuck)


def test_a_second_start_does_not_end_the_first(tmp_path):
    # Of a copy: both have one token, and neither finds the other's file with the process number.
    of = loopback(free_port(), 1)
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "open(os.path.join(sys.argv[1], 'runs'), 'w').close()\n"
        "while not os.path.exists(os.path.join(sys.argv[1], 'end')): time.sleep(0.05)\n"
    )
    options = EmitOptions(python=sys.executable, trainer_folder=str(tmp_path))
    settings = {"program": ("train.py",), "arguments": ((str(tmp_path),),)}
    first, second = (
        emitted(tmp_path / name, of, options, **settings) for name in ("first", "second")
    )
    running = begin(first / "start-here.sh", "alpha")
    wait_for(tmp_path / "runs")
    refused = begin(second / "start-here.sh", "alpha", HETPLAN_PYTHON="false")
    said = refused.communicate(timeout=SOON)[1]
    assert refused.returncode == 1, said
    assert running.poll() is None
    (tmp_path / "end").touch()
    said = running.communicate(timeout=SOON)[1]
    assert running.returncode == 0, said


def test_a_searched_variable_keeps_what_the_host_has(tmp_path):
    where = {"environment": (("PYTHONPATH", "{folder}/own code"), ("OTHER", "new"))}
    of = loopback(free_port(), 1)
    program = 'import os, sys; open(sys.argv[1], "w").write(os.environ["PYTHONPATH"])'
    (tmp_path / "train.py").write_text(program)
    options = EmitOptions(python=sys.executable, trainer_folder=str(tmp_path))
    for at, own in enumerate(("", "/opt/a:/opt/b c")):
        settings = {"program": ("train.py",), "arguments": ((str(tmp_path / f"got{at}"),),)}
        folder = emitted(tmp_path / f"a launch {at}", of, options, **settings, **where)
        script = begin(folder / "start-here.sh", "alpha", PYTHONPATH=own, OTHER="old")
        said = script.communicate(timeout=SOON)[1]
        assert script.returncode == 0, said
        more = f":{own}" if own else ""
        assert (tmp_path / f"got{at}").read_text() == f"{folder}/own code{more}"


def test_a_process_that_the_shell_alone_believes_in_is_not_waited_for(tmp_path):
    # bash may list a process that has ended as running, after a trap at the moment of its start.
    folder, _ = fake(tmp_path)
    hook = tmp_path / "hook.sh"
    hook.write_text(
        "jobs() { if [[ $* == -rp ]]; then builtin jobs -rp; echo 4194305; "
        'else builtin jobs "$@"; fi; }\n'
    )
    script = begin(
        folder / "start-here.sh",
        "alpha",
        BASH_ENV=str(hook),
        BARRIER_SECONDS="500",
        HETPLAN_GRACE_SECONDS="500",
    )
    wait_for(tmp_path / "pids")
    script.send_signal(signal.SIGTERM)
    said = script.communicate(timeout=SOON)[1]
    assert script.returncode == 143, said
    assert not living(tmp_path)
