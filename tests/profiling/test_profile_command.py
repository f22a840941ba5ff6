import datetime
import json
import os
import signal
import subprocess
import sys

import pytest
from profiling_samples import JOB, MODEL, invoke

from hetplan.profiling import work
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry, save_pace
from hetplan.profiling.store import read_store

SMALL = ("--hidden", "64", "--seq", "16", "--vocab", "32", "--microbatch", "1", "--tp", "1")


def run(*arguments, code: int = 0):
    return invoke("layers", "--device", "cpu", *arguments, code=code)


def test_it_measures_once_and_shows_always(tmp_path) -> None:
    first = json.loads(run("--store", tmp_path, *SMALL, "--json").stdout)
    assert first["schema"] == "hetplan.profiles/1"
    # Forward and backward of three kinds, both optimizers over one layer and over several.
    assert len(first["layers"]) == 10
    second = run("--store", tmp_path, *SMALL, "--json")
    assert json.loads(second.stdout) == first
    assert "0 samples measured, 10 in" in second.stderr
    run("--store", tmp_path, *SMALL, "--again", "--json")
    assert len(read_store(tmp_path).layers) == 20
    assert "transformer" in run("--store", tmp_path, *SMALL).stdout
    listed = invoke("list", "--store", tmp_path).stdout
    assert " 20 " in listed
    (population,) = json.loads(invoke("list", "--store", tmp_path, "--json").stdout)["populations"]
    assert (population["layer_rows"], population["damage"]) == (20, [])
    # Rows say themselves when they were measured, so those of --again can be told apart.
    assert {row.measured_on for row in read_store(tmp_path).layers} == {
        datetime.date.today().isoformat()
    }


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch) -> None:
    plain, calls = work.layer_rows, []

    def interrupted(*arguments, **names):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*arguments, **names)

    monkeypatch.setattr(work, "layer_rows", interrupted)
    result = run("--store", tmp_path, *SMALL, code=130)
    assert "the same command goes on from there" in result.stderr
    assert len(read_store(tmp_path).layers) == 4
    result = run("--store", tmp_path, *SMALL)
    assert "6 samples measured, 10 in" in result.stderr


def test_a_model_and_job_with_a_pace(tmp_path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    kind = PacedKind(
        device="snail",
        slow_down=4.0,
        entries=tuple(
            PaceEntry(layer="transformer", phase=phase, microbatch_size=2, tp=1, seconds=0.01)
            for phase in ("forward", "backward")
        ),
    )
    save_pace(Pace(kinds=(kind,)), tmp_path / "pace.json")
    files = ("--model", tmp_path / "model.yaml", "--job", tmp_path / "job.yaml")
    result = run("--store", tmp_path / "store", *files, "--pace", tmp_path / "pace.json", "--json")
    layers = json.loads(result.stdout)["layers"]
    assert {(row["device"], row["phase"]) for row in layers} == {
        ("snail", "forward"),
        ("snail", "backward"),
    }
    assert {row["microbatch_size"] for row in layers} == {2}
    # Half of the time at most is paid back for sleeping too long; unpaced it is a millisecond.
    assert sum(row["median_seconds"] for row in layers) >= 0.01
    (provenance,) = read_store(tmp_path / "store").provenance
    assert "slow-down 4" in provenance.paced


def test_wrong_options_are_named_and_write_nothing(tmp_path) -> None:
    for arguments, text in (
        (("--threads", 0), "--threads"),
        (("--threads", 100_000), "--threads is 100000, and this process may use"),
        (("--vocab", 0), "--vocab is 0; it must be at least 1"),
        (("--budget", -1), "--budget"),
        (("--job", "configs/jobs/gpt-tiny.yaml"), "belong together"),
        (("--tp", "1,x"), "'x'"),
        (("--precision", "float8"), "bfloat16"),
        (("--pace", "no.json"), "needs the --model and --job"),
    ):
        assert text in run("--store", tmp_path, *arguments, code=2).stderr
    assert "torchrun" in invoke("links", "wire", "--store", tmp_path, code=2).stderr
    assert not list(tmp_path.iterdir())


def two_processes(tmp_path, *options: str) -> dict:
    """What two torchrun processes print together as JSON."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--standalone", "-m", "hetplan", "profile", *options),
        *("--device", "cpu", "--store", str(tmp_path / "store"), "--json"),
    ]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 0, stderr
    return json.loads(stdout)


@pytest.mark.slow
def test_links_are_measured_under_torchrun(tmp_path) -> None:
    shown = two_processes(tmp_path, "links", "loopback", "--sizes", "4KiB")
    links = shown["links"]
    assert len(links) == 7
    found = read_store(tmp_path / "store")
    assert {sample.operation for sample in found.links} == {row["operation"] for row in links}
    assert found.provenance[0].device == "cpu"
