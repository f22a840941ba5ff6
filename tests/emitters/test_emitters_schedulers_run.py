"""Emitted scripts run for real: three hosts of this machine, torchrun, gloo, a small program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scheduler_sheets import clean_environment, emitted, free_port, host, launch, loopback, sheet

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.emitters.trainer_launch import EmitOptions

SOON = 120.0
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist

here = Path(os.environ["OUT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
found = [None] * world
dist.all_gather_object(
    found,
    {
        "rank": rank,
        "local": int(os.environ["LOCAL_RANK"]),
        "host": os.environ["NAME"],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "shared": os.environ["SHARED"],
        "words": sys.argv[1:],
        "at": os.getcwd(),
    },
)
if rank == 0:
    (here / "found.json").write_text(json.dumps(found))
if "--hang" in sys.argv:
    (here / f"{os.environ['NAME']}.{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)
dist.destroy_process_group()
"""


@pytest.fixture
def trainer(tmp_path) -> Path:
    folder = tmp_path / "the trainer's"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    return folder


def options(trainer: Path) -> EmitOptions:
    return EmitOptions(python=sys.executable, trainer_folder=str(trainer))


def settings(of, out: Path, *arguments: tuple[str, ...]) -> dict[str, object]:
    return {
        "program": ("train.py",),
        "arguments": arguments,
        "environment": (("SHARED", "{folder}/$(id)"), ("OUT", str(out))),
        "agent_environment": tuple((("NAME", agent.host.name),) for agent in of.agents),
        "agent_arguments": tuple((("--own", f"{agent.node_rank} x"),) for agent in of.agents),
    }


def test_ranks_come_out_in_the_planned_order(tmp_path, trainer):
    of = loopback(free_port(), 2, 1, 1)
    # Names that nothing may take apart, on the way to every rank.
    hostile = ("--text", "a b $(touch pwned) `id` 'x\" \\ ; & | > < * ? # ~ é")
    folder = emitted(tmp_path / "a launch", of, options(trainer), **settings(of, tmp_path, hostile))
    processes = [
        subprocess.Popen(
            ["bash", folder / "start-here.sh", each.name],
            env=clean_environment(PET_NNODES="7", PET_RDZV_ENDPOINT="nowhere:1"),
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for each in reversed(of.hosts)
    ]
    for process in processes:
        said = process.communicate(timeout=SOON)[1]
        assert process.returncode == 0, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(each["rank"], each["host"], each["local"]) for each in found] == [
        (0, "alpha", 0),
        (1, "alpha", 1),
        (2, "beta", 0),
        (3, "gamma", 0),
    ]
    for each, number in zip(found, (0, 0, 1, 2), strict=True):
        assert each["words"] == [*hostile, "--own", f"{number} x"]
        assert each["shared"] == f"{folder}/$(id)"
        assert each["at"] == str(trainer)
    assert not list(tmp_path.rglob("pwned"))
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "alpha-agent0.log",
        "beta-agent1.log",
        "gamma-agent2.log",
    ]


def test_one_is_killed_and_all_end_and_its_name_is_said(tmp_path, trainer):
    of = loopback(free_port(), 1, 1, 1)
    folder = emitted(
        tmp_path / "launch", of, options(trainer), **settings(of, tmp_path, ("--hang",))
    )
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text('#!/usr/bin/env bash\nexec bash -c "${!#}"\n')
    (programs / "ssh").chmod(0o755)
    start = subprocess.Popen(
        ["bash", folder / "start-all.sh"],
        env=clean_environment(PATH=f"{programs}:{os.environ['PATH']}"),
        stderr=subprocess.PIPE,
        text=True,
    )
    pids: dict[str, int] = {}
    try:
        end = time.monotonic() + SOON
        while len(pids) < 3 or not all(pids.values()):
            assert time.monotonic() < end
            assert start.poll() is None
            time.sleep(0.05)
            pids = {
                path.name.partition(".")[0]: int(path.read_text() or 0)
                for path in tmp_path.glob("*.pid")
            }
        os.kill(pids["beta"], signal.SIGKILL)
        said = start.communicate(timeout=SOON)[1]
        assert start.returncode == 1, said
        assert "host beta has failed with status 1" in said
        assert "Signal 9 (SIGKILL)" in said
        assert not any(alive(pid) for pid in pids.values())
        assert not list((folder / "logs").glob("*.pid"))
    finally:
        start.kill()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        start.communicate()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def run(folder: Path, *words: str, script: str = "start-here.sh", **more: str):
    return subprocess.run(
        ["bash", folder / script, *words],
        env=clean_environment(**more),
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def test_several_agents_of_a_host_see_their_own_devices(tmp_path):
    first, second = host("n1"), host("n2")
    of = sheet((first, (0, 1, 2, 3)), (second, (6, 4)), (first, (7, 5)))
    found = run(emitted(tmp_path, of), "--dry-run", "n1").stdout.splitlines()
    assert len(found) == 3
    assert found[0].startswith("python3 ")
    for line, rank, count, visible in zip(
        found[1:], (0, 2), (4, 2), ("0\\,1\\,2\\,3", "7\\,5"), strict=True
    ):
        assert f"env CUDA_VISIBLE_DEVICES={visible} python3 -m torch.distributed.run" in line
        assert f" --nnodes=3 --nproc-per-node={count} --node-rank={rank} " in line
        assert " --rdzv-backend=static --master-addr=n1 --master-port=29500 " in line


@pytest.mark.parametrize(
    ("words", "environment", "found"),
    [
        (["oak.example.org"], {}, "oak.example.org"),
        (["oak"], {}, "oak.example.org"),
        (["10.0.0.7"], {}, "pine"),
        (["pine.far.example.org"], {}, "pine"),
        ([], {"HETPLAN_HOST": "pine"}, "pine"),
        ([], {"SLURMD_NODENAME": "pine"}, "pine"),
        (["oak"], {"HETPLAN_HOST": "pine"}, "oak.example.org"),
        (["twin.a"], {}, "twin.a"),
    ],
)
def test_a_host_is_found_by_its_full_and_its_short_name(tmp_path, words, environment, found):
    hosts = ["oak.example.org", "twin.a", "twin.b", "10.1.1.1"]
    parts = [(host(name), (number,)) for number, name in enumerate(hosts)]
    of = sheet(*parts, (host("pine", address="10.0.0.7"), (0,)))
    got = run(emitted(tmp_path, of), "--dry-run", *words, **environment)
    assert got.returncode == 0, got.stderr
    assert got.stdout.splitlines()[0].endswith(f" {found} ")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("twin", "may be twin.a or twin.b"),
        ("elm", "none of the hosts in"),
        ("10", "none of the hosts in"),
        ("node_rank", "none of the hosts in"),
        ("host", "none of the hosts in"),
        ("*", "none of the hosts in"),
        ("$(id)", "none of the hosts in"),
        ("--wrong", "unknown option --wrong"),
    ],
)
def test_a_host_that_is_not_there_or_not_clear_is_said(tmp_path, word, says):
    of = sheet((host("twin.a"), (0,)), (host("twin.b"), (0,)), (host("10.1.1.1"), (0,)))
    got = run(emitted(tmp_path, of), "--dry-run", word)
    assert got.returncode == 2
    assert says in got.stderr


def test_a_name_under_which_this_host_is_not_there_is_said_once(tmp_path):
    of = sheet((host("twin.a"), (0,)), (host("twin.b"), (0,)))
    name = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    got = run(emitted(tmp_path, of), "--dry-run", SLURMD_NODENAME=name)
    assert got.returncode == 2
    called = got.stderr.partition("is called ")[2].partition(";")[0].split()
    assert name in called
    assert len(called) == len(set(called))


def test_without_the_trainers_folder_nothing_is_started(tmp_path):
    got = run(emitted(tmp_path, sheet((host("n1"), (0,)))), "n1")
    assert got.returncode == 2
    assert "set TRAINER_FOLDER" in got.stderr
    assert not (tmp_path / "logs").exists()


def test_where_nothing_runs_nothing_is_stopped(tmp_path):
    folder = emitted(tmp_path, sheet((host("n1"), (0,))))
    (folder / "logs").mkdir()
    (folder / "logs" / "n1.pid").write_text(f"{os.getpid()}\n")  # by now another program's
    got = run(folder, "--stop", "n1")
    assert got.returncode == 0
    assert "n1: nothing runs" in got.stderr


def test_a_barrier_that_nobody_else_reaches_starts_no_trainer(tmp_path):
    of = loopback(free_port(), 1, 1)
    folder = emitted(tmp_path, of, EmitOptions(python=sys.executable, trainer_folder=str(tmp_path)))
    got = run(folder, "alpha", HETPLAN_BARRIER_SECONDS="0.5")
    assert got.returncode == 3
    assert "1 of 2 hosts have not come: beta" in got.stderr
    assert not list((folder / "logs").iterdir())


def test_what_differs_by_agent_does_not_make_the_script_longer(tmp_path):
    def size(count: int) -> int:
        names = [f"n{number:05d}" for number in range(count)]
        of = sheet(*((host(name), tuple(range(8))) for name in names))
        kinds = tuple((("TYPE", f"{number}"),) for number in range(count))
        words = tuple((("--type", f"{number}"),) for number in range(count))
        folder = emitted(tmp_path / str(count), of, agent_environment=kinds, agent_arguments=words)
        got = run(folder, "--dry-run", names[-1])
        assert f"env TYPE={count - 1} python3" in got.stdout
        assert f"--type {count - 1}" in got.stdout
        return len((folder / "start-here.sh").read_bytes())

    assert abs(size(2000) - size(2)) < 10


DOMAINS = tuple(
    LaunchDomain(name=name, islands=("a",), ssh_user=user, ssh_port=port)
    for name, user, port in (("one", "", 22), ("two", "me", 2222))
)


def test_start_all_prints_what_it_would_do(tmp_path):
    folder = tmp_path / "a launch $(id)"
    of = sheet((host("n1", DOMAINS[0]), (0,)), (host("n2", DOMAINS[1], address="fd00::2"), (0,)))
    emitted(folder, of)
    got = run(folder, "--dry-run", "--copy", script="start-all.sh", TRAINER_FOLDER="/my trainer")
    assert got.returncode == 0, got.stderr
    common = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30 -p"
    lines = got.stdout.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith(f"{common} 22 -- n1 ")
    assert lines[3].startswith(f"{common} 2222 -l me -- fd00::2 ")
    # What ssh gives to the other host's shell is again the words that were meant.
    (command,) = json.loads(
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import json,shlex,sys;print(json.dumps(shlex.split(sys.argv[1])[-1:]))",
                lines[2],
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words == ["env", "TRAINER_FOLDER=/my trainer", "bash", f"{folder}/start-here.sh", "n1"]


def test_start_all_starts_one_domain_where_it_is_asked_to(tmp_path):
    of = sheet((host("n1", DOMAINS[0]), (0,)), (host("n2", DOMAINS[1]), (0,)))
    folder = emitted(tmp_path, of)
    got = run(folder, "--dry-run", "--only", "two", script="start-all.sh")
    assert [line.split(" -- ")[1].split()[0] for line in got.stdout.splitlines()] == ["n2"]
    got = run(folder, "--only", "three", script="start-all.sh")
    assert got.returncode == 2
    assert "no domain is called three; there are: one two" in got.stderr
    assert launch(of).program == ("pretrain.py",)
