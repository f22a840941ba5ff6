"""Programs that hang, flood, fail or are missing, and the command itself."""

from __future__ import annotations

import sys
import time

import pytest
from machine_fakes import run_doctor

from hetplan.cli.doctor import doctor
from hetplan.files.reading import decode, read_document
from hetplan.machine.host import AnswerState, Probe, find_processor, run_program
from hetplan.machine.report import DOCTOR_SCHEMA, MachineReport


def python(code, seconds=20.0):
    return run_program((sys.executable, "-c", code), seconds)


def test_what_a_program_says_on_stderr_is_dropped():
    answer = python("import sys; print('secret', file=sys.stderr); sys.exit(3)")
    assert (answer.state, answer.text, answer.reason) == (AnswerState.FAILED, "", "exit code 3")


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
        "import os, time; os.close(1); time.sleep(60)",
        "import subprocess; subprocess.run(['sleep', '60'])",
    ],
)
def test_a_program_that_hangs_is_ended_in_time(code):
    start = time.monotonic()
    answer = python(code, seconds=0.5)
    assert answer.state is AnswerState.TIMEOUT
    assert time.monotonic() - start < 5.0


def test_a_program_that_floods_is_not_read_on():
    start = time.monotonic()
    answer = python("while True: print('x' * 1000)", seconds=30.0)
    assert answer.state is AnswerState.TIMEOUT
    assert len(answer.text) < 2 << 20
    assert time.monotonic() - start < 15.0


def test_this_machine_tells_what_every_linux_tells():
    probe = Probe(run=run_program)
    found = find_processor(probe)
    assert 0 < found.usable_cores <= found.cores
    assert 0 < found.available_bytes <= found.memory_bytes
    assert probe.text("proc/self/mem") == ""
    assert probe.text("proc") == ""
    assert probe.names("proc/cpuinfo") == ()
    assert not probe.exists("gone/gone")


def test_the_command_prints_one_screen_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "false")  # its torch says nothing
    doctor()
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    assert "layers on a CPU core" in shown
    assert "torch: cannot be imported" in shown


@pytest.mark.slow  # imports torch
def test_the_json_can_be_read_back_also_with_a_damaged_file_of_the_users(tmp_path):
    folder = tmp_path / "hetplan" / "devices"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("schema: nonsense\n")
    done = run_doctor("--json", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0
    (tmp_path / "doctor.json").write_text(done.stdout)
    report = decode(read_document(tmp_path / "doctor.json"), MachineReport, schema=DOCTOR_SCHEMA)
    assert report.torch.version
    assert "gloo" in report.torch.backends
    assert report.problems[0].startswith("device catalogue:")
