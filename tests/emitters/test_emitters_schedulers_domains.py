"""One job over plain hosts, Slurm and Kubernetes, started by start-all.sh.

The scripts, the barrier and the control of all of them are the emitted ones; ssh, sbatch, srun,
squeue, scancel and kubectl are small programs that start processes here, and torchrun is one that
ends at once, as it is told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scheduler_sheets import (
    PLAIN,
    PODS,
    SLURM,
    clean_environment,
    emitted,
    free_port,
    host,
    sheet,
)

SOON = 60.0
PROGRAMS = {
    "ssh": 'exec bash -c "${!#}"',
    "sbatch": """
SLURM_SUBMIT_DIR=$PWD setsid bash "${!#}" > "$FAKES/sbatch.out" 2>&1 &
echo "$!" > "$FAKES/sbatch.pid"
echo "77;here"
""",
    "squeue": 'kill -0 "$(cat "$FAKES/sbatch.pid")" 2>/dev/null && echo RUNNING',
    "scancel": """
echo "$@" > "$FAKES/cancelled"
kill -TERM -- "-$(cat "$FAKES/sbatch.pid")"
""",
    # Slurm sorts the nodes of a job, gives every task its node's name, and ends the other tasks of
    # a step when one has failed.
    "srun": """
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
for node in hpc01 hpc02; do SLURMD_NODENAME=$node "$@" & done
status=0
for node in hpc01 hpc02; do
  wait -n || { ended=$?; ((status)) || status=$ended; kill -TERM $(jobs -p) 2>/dev/null; }
done
exit "$status"
""",
    "kubectl": """
case " $* " in
  *" get crd "*) exit 0 ;;
  *" create "*)
    for node in pool-1 pool-2; do
      (
        HETPLAN_HOST=$node HETPLAN_LOGS=- bash "$FOLDER/start-here.sh" > "$FAKES/$node.log" 2>&1
        echo "$?" > "$FAKES/$node.status"
      ) < /dev/null > /dev/null 2>&1 &
    done ;;
  *" get pods "*)
    for node in pool-1 pool-2; do
      phase=Running
      if [[ -s $FAKES/$node.status ]]; then
        [[ $(< "$FAKES/$node.status") == 0 ]] && phase=Succeeded || phase=Failed
      fi
      echo "pod-of-$node $node $phase"
    done ;;
  *" logs "*) echo "log of ${!#}" ;;
  *" delete "*)
    echo "${!#}" >> "$FAKES/deleted"
    for node in pool-1 pool-2; do
      HETPLAN_HOST=$node HETPLAN_LOGS=- bash "$FOLDER/start-here.sh" --stop
    done ;;
esac
""",
    "torchrun": """
if [[ $1 != -m ]]; then exec "$REAL_PYTHON" "$@"; fi
echo "$NAME $*"
[[ $NAME != "${FAILS:-}" ]] || exit 9
[[ -z ${HANGS:-} ]] || sleep 300
""",
}


@pytest.fixture
def site(tmp_path):
    """A folder for two hosts of each scheduler, and the environment that runs it here."""
    programs, fakes = tmp_path / "programs", tmp_path / "fakes"
    programs.mkdir()
    fakes.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text.strip()}\n")
        (programs / name).chmod(0o755)
    here = {"address": "127.0.0.1", "device_kind": "cpu", "vendor": "generic"}
    names = (("oak", PLAIN), ("pool-2", PODS), ("hpc02", SLURM), ("pine", PLAIN))
    names += (("hpc01", SLURM), ("pool-1", PODS))
    of = sheet(*((host(name, domain, **here), (0,)) for name, domain in names), port=free_port())
    folder = emitted(
        tmp_path / "a launch",
        of,
        program=("-m", "trainer"),
        agent_environment=tuple((("NAME", agent.host.name),) for agent in of.agents),
    )
    environment = clean_environment(
        PATH=f"{programs}:{os.environ['PATH']}",
        FAKES=str(fakes),
        TMPDIR=str(fakes),
        FOLDER=str(folder),
        HETPLAN_PYTHON=str(programs / "torchrun"),
        REAL_PYTHON=sys.executable,
        HETPLAN_POLL_SECONDS="0.2",
        HETPLAN_BARRIER_SECONDS="50",
        HETPLAN_GRACE_SECONDS="5",
    )
    yield folder, fakes, environment
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(folder: Path, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", folder / "start-all.sh", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=SOON)[0]
    finally:
        process.kill()


def test_all_domains_meet_and_every_host_starts_its_own_agent(site):
    folder, fakes, environment = site
    process = start(folder, environment)
    said = ended(process)
    assert process.returncode == 0, said
    for name in ("host oak", "host pine", "domain north-slurm", "domain west-pods"):
        assert f"{name}" in said
    logs = folder / "logs"
    ranks = {}
    for name in ("oak", "pine", "hpc01", "hpc02"):
        (log,) = logs.glob(f"{name}-agent*.log")
        ranks[name] = log.read_text().split("--node-rank=")[1].split()[0]
        assert log.read_text().startswith(f"{name} -m torch.distributed.run --nnodes=6 ")
    for name in ("pool-1", "pool-2"):
        ranks[name] = (fakes / f"{name}.log").read_text().split("--node-rank=")[1].split()[0]
    assert ranks == {
        "oak": "0",
        "pool-2": "1",
        "hpc02": "2",
        "pine": "3",
        "hpc01": "4",
        "pool-1": "5",
    }
    assert (logs / "north-slurm.status").read_text() == "0\n"
    assert (logs / "pod-of-pool-1.log").read_text() == "log of pod-of-pool-1\n"


@pytest.mark.parametrize(
    ("name", "says", "status"),
    [
        ("hpc02", "domain north-slurm (Slurm job 77) has failed with status 9", 9),
        ("pool-1", "west-pods: pod pod-of-pool-1 on pool-1 has failed", 1),
        ("pine", "host pine has failed with status 9", 9),
    ],
)
def test_whoever_fails_is_named_and_the_others_are_ended(site, name, says, status):
    folder, fakes, environment = site
    process = start(folder, environment | {"FAILS": name, "HANGS": "yes"})
    said = ended(process)
    assert says in said
    assert process.returncode == status
    assert (fakes / "cancelled").read_text() == "77\n"
    assert {Path(line).name for line in (fakes / "deleted").read_text().splitlines()} == {
        "kubernetes-west-pods.yaml",
        "kubernetes-west-pods-jobs.yaml",
    }
    assert not running(folder)


def test_interrupted_while_a_host_is_missing_everything_is_ended(site):
    folder, fakes, environment = site
    process = start(folder, environment, "--only", "north-slurm", "--only", "lab")
    end = time.monotonic() + SOON
    while len(processes_of(folder, "barrier.py")) < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = ended(process)
    assert process.returncode == 130
    assert "interrupted" in said
    assert (fakes / "cancelled").exists()
    assert not (fakes / "deleted").exists()
    assert not running(folder)


def test_a_scheduler_that_is_not_here_is_said_before_anything_starts(site, tmp_path):
    folder, _, environment = site
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "cat", "ssh"):
        found = tmp_path / "programs" / name
        if not found.exists():
            found = Path(subprocess.check_output(["which", name], text=True).strip())
        (bare / name).symlink_to(found)
    process = start(folder, environment | {"PATH": str(bare)})
    said = ended(process)
    assert process.returncode == 2
    assert "sbatch is not here" in said
    assert "--only north-slurm" in said
    assert not (folder / "logs").exists()


def running(folder: Path) -> list[int]:
    """Processes that belong to the folder, once all that are told to end have had their time."""
    end = time.monotonic() + 10
    while (found := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def processes_of(folder: Path, word: str = "") -> list[int]:
    """Numbers of processes on whose command lines the folder and the word stand."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and word in line:
                found.append(int(path.parent.name))
    return found
