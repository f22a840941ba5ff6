"""`start-all.sh --check` looks at all hosts at one time and prints the report of the first."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from emit_cases import PLAIN
from preflight_cases import two_host_result
from scheduler_sheets import MIXED, clean_environment, emitted, launch, loopback, sheet, write

from hetplan.emitters.emission import emission_for
from hetplan.emitters.preflight import program_files
from hetplan.emitters.schedulers import kubernetes, scheduled_files
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions

NATIVE = replace(PLAIN, plan_target="native")
SSH = '#!/usr/bin/env bash\nexec bash -c "${!#}"\n'
FAKE_CHECK = """
import sys
host = sys.argv[sys.argv.index("--host") + 1]
print("report of", host, *sys.argv[3:])
sys.exit({"alpha": ALPHA, "beta": BETA}.get(host, 0))
"""
SBATCH = """#!/usr/bin/env bash
export SLURM_SUBMIT_DIR=$PWD
domain=${2#slurm-}
bash "${@:2}" > "slurm-${domain%.sbatch}-77.out" 2>&1
echo 77
"""
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "$*"
for host in $NODES; do SLURMD_NODENAME=$host "${@: -3}" || status=1; done
exit "${status:-0}"
"""


def programs(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def start(folder: Path, bin_: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", folder / "start-all.sh", *words],
        env=clean_environment(
            PATH=f"{bin_}:{os.environ['PATH']}", HETPLAN_POLL_SECONDS="0", **more
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )


def fake(folder: Path, of: LaunchSheet, alpha: int = 0, beta: int = 0) -> Path:
    emitted(folder, of, EmitOptions(python=sys.executable))
    text = FAKE_CHECK.replace("ALPHA", str(alpha)).replace("BETA", str(beta))
    (folder / "check.py").write_text(text)
    return folder


def test_two_hosts_are_checked_for_real(tmp_path):
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    (trainer / "train.py").write_text("raise SystemExit('nothing is trained')")
    options = EmitOptions(python=sys.executable, trainer_folder=str(trainer))
    files = emission_for(two_host_result(), NATIVE, options).files
    folder = write(tmp_path / "a launch", files)
    got = start(folder, programs(tmp_path / "bin", ssh=SSH), "--check")
    lines = got.stdout.splitlines()
    assert lines[0].split() == ["host", "checks"]
    assert [line.split()[0] for line in lines[1:3]] == ["one", "two"]
    assert "links: 1 of the 1 that the plan sends over" in got.stdout
    mend = [line for line in lines if line.startswith("MEND")]
    assert (got.returncode, lines[-1]) == (
        (1, "something must be mended") if mend else (0, "ready")
    )
    assert "ended with status" not in got.stderr
    assert not list((folder / "logs").glob("*.pid"))


@pytest.mark.parametrize(("alpha", "beta", "status"), [(0, 0, 0), (1, 1, 1), (0, 1, 1), (0, 3, 3)])
def test_all_end_before_the_first_report_is_printed(tmp_path, alpha, beta, status):
    folder = fake(tmp_path / "launch", loopback(29600, 1, 1), alpha, beta)
    got = start(folder, programs(tmp_path / "bin", ssh=SSH), "--check", HETPLAN_BARRIER_SECONDS="7")
    assert got.returncode == status
    assert got.stdout == "report of alpha --timeout 7\n"
    assert "report of beta" in (folder / "logs" / "beta.check.log").read_text()
    assert ("host beta was not checked: status 3" in got.stderr) is (status == 3)


def test_slurm_checks_in_its_job(tmp_path):
    first, second = MIXED.agents[1:3]
    of = sheet((first.host, first.local_devices), (second.host, second.local_devices))
    folder = fake(tmp_path / "launch", of)
    bin_ = programs(tmp_path / "bin", sbatch=SBATCH, srun=SRUN, squeue="#!/bin/sh\n")
    got = start(folder, bin_, "--check", NODES="hpc01 hpc02")
    assert got.returncode == 0, got.stderr
    assert "report of hpc01\n" in got.stdout
    assert "report of hpc02\n" in got.stdout
    assert "--kill-on-bad-exit=0" in got.stdout
    assert "--kill-on-bad-exit=1" not in got.stdout


KUBECTL = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case " $* " in
  *" get pods "*) printf 'p1 pool-1 Succeeded\\np2 pool-2 Failed\\n' ;;
  *" logs p1"*) echo report of pool-1 ;;
  *" logs p2"*) echo report of pool-2 ;;
esac
"""


def pods(folder: Path) -> Path:
    of = sheet(*((agent.host, agent.local_devices) for agent in MIXED.agents[3:5]))
    files = scheduled_files(of, launch(of), EmitOptions(), program_files())
    return write(folder, files)


def test_pods_check_with_a_manifest_of_their_own(tmp_path):
    folder = pods(tmp_path / "launch")
    bin_ = programs(tmp_path / "bin", kubectl=KUBECTL)
    got = start(folder, bin_, "--check", CALLS=str(tmp_path / "calls"))
    assert got.returncode == 1
    assert got.stdout == "report of pool-1\n"
    calls = (tmp_path / "calls").read_text()
    created = [line for line in calls.splitlines() if " create " in line]
    assert created == [f"--namespace training create -f {folder}/kubernetes-west-pods-check.yaml"]
    config, job = yaml.safe_load_all((folder / "kubernetes-west-pods-check.yaml").read_text())
    label = config["metadata"]["name"]
    assert f"-l hetplan-job={label} " in calls
    assert label.endswith("-check")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "/hetplan/start-here.sh", "--check"]
    needed = {"start-here.sh", "agents.tsv", *(each.path for each in program_files())}
    assert needed <= set(config["data"])
    # The run's own objects hold no more than they did.
    run, *_ = yaml.safe_load_all((folder / "kubernetes-west-pods.yaml").read_text())
    assert "check.py" not in run["data"]
    assert "kubernetes-west-pods-check.yaml" in calls.split(" delete ", 1)[1]


def test_what_no_config_map_holds_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes, "MAX_CONFIG_BYTES", 30_000)
    folder = pods(tmp_path / "launch")
    assert not (folder / "kubernetes-west-pods-check.yaml").exists()
    bin_ = programs(tmp_path / "bin", kubectl=KUBECTL)
    got = start(folder, bin_, "--check", CALLS=str(tmp_path / "calls"))
    assert got.returncode == 2
    assert "west-pods has too many hosts for a check in pods" in got.stderr
    assert not (tmp_path / "calls").exists()


def test_a_part_is_checked_and_the_first_host_named(tmp_path):
    of = loopback(29600, 1, 1)
    domain = replace(of.agents[1].host.domain, name="other")
    agents = (of.agents[0], replace(of.agents[1], host=replace(of.agents[1].host, domain=domain)))
    folder = fake(tmp_path / "launch", replace(of, agents=agents))
    got = start(folder, programs(tmp_path / "bin", ssh=SSH), "--check", "--only", "other")
    assert got.returncode == 0
    assert got.stdout == ""
    assert "alpha, the first host, tells of all" in got.stderr


def test_the_dry_run_prints_the_commands(tmp_path):
    made = launch(MIXED)
    folder = write(tmp_path, scheduled_files(MIXED, made, EmitOptions(), program_files()))
    got = start(folder, tmp_path, "--check", "--dry-run", "--copy")
    assert got.returncode == 0, got.stderr
    assert "sbatch --parsable slurm-north-slurm.sbatch --check" in got.stdout
    assert "kubernetes-west-pods-check.yaml" in got.stdout
    assert got.stdout.count("start-here.sh\\ --check\\ ") == 2
    assert got.stderr == ""
