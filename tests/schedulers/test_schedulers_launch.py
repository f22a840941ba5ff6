"""Launch scripts start the planned ranks; jobs of Slurm and Kubernetes are what those read."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_layouts import (
    MIXED,
    NVIDIA,
    PODS,
    SLURM,
    WHOLE,
    clean_environment,
    emitted,
    host,
    launch,
    layout,
    layouts,
    with_kinds,
)

from hetplan.cluster.launch_domains import KindLaunch
from hetplan.cluster.node import expand_names
from hetplan.errors import InputError
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.quoting import hostlist

# Options of sbatch that stand in emitted scripts, of all those in its manual page (SchedMD/slurm,
# doc/man/man1/sbatch.1, of 26.11): name, and what its value may be.
SBATCH = {
    "account": r"[\w.-]+",
    "exclusive": None,
    "gpus-per-node": r"(?:[\w.-]+:)?[1-9]\d*",
    "job-name": r"[\w.-]+",
    "mem": r"0",
    "no-requeue": None,
    "nodelist": r"[\w.,\[\]-]+",
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"1",
    "output": r"[\w.%-]+",
    "partition": r"[\w.-]+",
    "time": r"\d+-\d\d:\d\d:\d\d",
}
# The same of srun (srun.1), and of pyxis (github.com/NVIDIA/pyxis, README: usage).
SRUN = {"het-group", "nodes", "ntasks", "ntasks-per-node", "cpu-bind", "kill-on-bad-exit", "output"}
PYXIS = {"container-image", "container-mounts"}
# Stands for the interpreter: says what it was started with.
PYTHON = """#!{python}
import json, os, sys
words, seen = sys.argv[1:], {{name: os.environ.get(name) for name in ("SHARED", "NAME")}}
pet = [name for name in os.environ if name.startswith("PET_")]
os.write(1, (json.dumps([words, seen, os.getcwd(), pet]) + chr(10)).encode())
"""


def files(of, scheduler: str = "torchrun", **more: object) -> dict[str, str]:
    options = EmissionOptions(scheduler=scheduler)
    return {
        file.path: file.text
        for file in SCHEDULERS[scheduler].files(of, launch(of, **more), options)
    }


def interpreter(folder: Path, text: str = PYTHON) -> Path:
    path = folder / "python"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


def started(script: Path, *words: str, python: Path, **environment: str) -> list[list[object]]:
    """What every call of torchrun was given, by node rank."""
    done = subprocess.run(
        ["bash", script, *words],
        env=clean_environment(HETPLAN_PYTHON=str(python), PET_NNODES="7", **environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(calls, key=lambda call: int(option(call[0], "--node-rank")))


def option(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


# ------------------------------------------------------------------------------------ launch.sh


def test_every_host_starts_its_own_calls_with_its_own_settings(tmp_path):
    one, two = host("one.example"), host("two.example")
    of = layout((one, (0, 1)), (two, WHOLE), (one, (2, 3)))
    hostile = ("--text", "a b $(touch pwned) `id` 'x\" \\ ; & | > < * ? # ~ é")
    trainer = tmp_path / "the trainer's"
    trainer.mkdir()
    visible = ({0: "0,1", 2: "2,3"}.get(number, "") for number in range(3))
    folder = emitted(
        tmp_path / "a launch",
        of,
        EmissionOptions(trainer_folder=str(trainer)),
        program=("train.py",),
        arguments=(hostile,),
        environment=(("SHARED", "{folder}/$(id)"),),
        agent_environment=tuple(
            (("NAME", f"of {number}"), ("CUDA_VISIBLE_DEVICES", each))
            for number, each in enumerate(visible)
        ),
        agent_arguments=tuple((("--own", f"{agent.node_rank} x"),) for agent in of.agents),
    )
    python = interpreter(tmp_path)
    calls = started(folder / "launch.sh", python=python, HETPLAN_HOST="one")
    assert [option(words, "--node-rank") for words, *_ in calls] == ["0", "2"]
    for words, seen, at, pet in calls:
        number = option(words, "--node-rank")
        assert words[:2] == ["-m", "torch.distributed.run"]
        assert (option(words, "--nnodes"), option(words, "--nproc-per-node")) == ("3", "2")
        assert (option(words, "--master-addr"), option(words, "--master-port")) == (
            "one.example",
            "29500",
        )
        assert words[words.index("train.py") + 1 :] == [*hostile, "--own", f"{number} x"]
        assert seen == {"SHARED": f"{folder}/$(id)", "NAME": f"of {number}"}
        assert (at, pet) == (str(trainer), [])
    ((words, *_),) = started(folder / "launch.sh", "two.example", python=python)
    assert option(words, "--nproc-per-node") == "8"
    assert not list(tmp_path.rglob("pwned"))


def test_a_told_script_ends_its_calls(tmp_path):
    folder = emitted(tmp_path, layout((host("a"), WHOLE)), EmissionOptions(trainer_folder="/"))
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\ntrap 'touch {tmp_path}/told; exit 1' TERM\n"
        f"touch {tmp_path}/runs\nwhile :; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    script = subprocess.Popen(
        ["bash", folder / "launch.sh", "a"], env=clean_environment(HETPLAN_PYTHON=str(python))
    )
    while not (tmp_path / "runs").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait() == 143
    assert (tmp_path / "told").exists()


def test_agents_of_one_pod_see_places_among_the_pods_own_devices():
    pod = host("pool-1", PODS)
    of = layout((pod, (2, 3)), (host("pool-2", PODS), (0, 1)), (pod, (7, 6)))
    text = files(of)["launch.sh"]
    assert re.findall(r"CUDA_VISIBLE_DEVICES='?([\d,]+)", text) == ["0,1", "3,2"]


def test_hostile_host_names_are_refused():
    for name in ("a b", "a\tb", "$(id)", "`id`", "a;b", "a'b", '"', "", "é", "a\0b", "{1..2}"):
        with pytest.raises(InputError, match=r"launch\.sh"):
            files(layout((host(name), WHOLE)))


def test_what_no_script_can_carry_is_refused():
    biren = host("n1", vendor="biren", device_kind="biren-br100")
    apart = layout((biren, (0, 1)), (host("n2"), WHOLE), (biren, (2, 3)))
    with pytest.raises(InputError, match="host n1 runs 2 agents"):
        files(apart)
    with pytest.raises(InputError, match="no name of an environment variable"):
        files(MIXED, environment=(("A B", "1"),))
    for more in ({"environment": (("A", "1\n2"),)}, {"arguments": (("--a", "1\n2"),)}):
        with pytest.raises(InputError, match="control character"):
            files(MIXED, **more)


TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=12)


@given(of=layouts(), words=st.lists(TEXT, max_size=4), value=TEXT)
@settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_layout_is_started_as_planned(tmp_path, of, words, value):
    folder = emitted(
        tmp_path,
        of,
        EmissionOptions(trainer_folder="/"),
        arguments=tuple((f"--word{number}", word) for number, word in enumerate(words)),
        environment=(("SHARED", value),),
    )
    script = folder / "launch.sh"
    # The calls as bash reads them, not made.
    text = script.read_text().partition("unset ")[0]
    text += 'printf \'%s\\0\' "${#calls[@]}" "${calls[@]%/*}" "$SHARED" "${arguments[@]}"\n'
    done = subprocess.run(["bash", "-c", text, "x"], capture_output=True, text=True, check=True)
    count, *told = done.stdout.split("\0")[:-1]
    calls = int(count)
    assert told[:calls] == [agent.host.name for agent in of.agents]
    flags = [each for number, word in enumerate(words) for each in (f"--word{number}", word)]
    assert told[calls:] == [value, *flags] or (not flags and told[calls:] == [value, ""])


# ---------------------------------------------------------------------------------------- Slurm


def components(text: str) -> list[dict[str, str]]:
    """Options of each component of a job script; every one is known and has a right value."""
    rows: list[dict[str, str]] = [{}]
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    assert directives == lines[1 : len(directives) + 1]
    for line in directives:
        word = line.removeprefix("#SBATCH ")
        if word == "hetjob":
            rows.append({})
            continue
        option, has_value, value = word.removeprefix("--").partition("=")
        wanted = SBATCH[option]
        assert (wanted is None) == (not has_value)
        assert wanted is None or re.fullmatch(wanted, value, re.ASCII), line
        rows[-1][option] = value
    return rows


def steps(text: str) -> list[list[str]]:
    return [
        [word for word in block.split("\n")[0].split() if word.startswith("--")]
        for block in text.replace(" \\\n", " ").split("\nsrun")[1:]
    ]


def test_unlike_nodes_are_components_of_one_job_with_a_step_each():
    domain = replace(
        with_kinds(
            SLURM,
            KindLaunch(device=NVIDIA, resource="a100"),
            KindLaunch(device="amd-mi210", resource="mi210", image="reg.example.org:5000/rocm:1"),
        ),
        image="train/cuda:1",
    )
    amd = {"device_kind": "amd-mi210", "vendor": "amd", "devices_per_node": 4}
    of = layout(
        (host("a1", domain), WHOLE),
        (host("b1", domain, **amd), WHOLE[:4]),
        (host("a2", domain), WHOLE),
    )
    text = files(of, "slurm")["launch.sbatch"]
    first, second = components(text)
    assert (first["nodelist"], first["nodes"], first["gpus-per-node"]) == ("a[1-2]", "2", "a100:8")
    assert (second["nodelist"], second["gpus-per-node"]) == ("b1", "mi210:4")
    one, two = steps(text)
    assert "--container-image=train/cuda:1" in one
    assert "--container-image='reg.example.org:5000#rocm:1'" in two
    assert ("--het-group=0" in one, "--het-group=1" in two) == (True, True)
    assert {word[2:].partition("=")[0] for word in (*one, *two)} <= SRUN | PYXIS


WORDS = st.from_regex(r"[a-z]{1,2}(-?[0-9]{1,4})?(-gpu)?", fullmatch=True)


@given(names=st.lists(WORDS, min_size=1, max_size=30, unique=True))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_host_list_stands_for_the_same_hosts(names):
    entries = re.findall(r"[^,\[]+(?:\[[^\]]*\])?", hostlist(names))
    assert sorted(expand_names(entries)) == sorted(names)


# ------------------------------------------------------------------------------------ Kubernetes


def job_sets(of, **more: object) -> list[dict]:
    """The JobSets; the jobs in them fit the schemas that Kubernetes publishes."""
    documents = list(yaml.safe_load_all(files(of, "kubernetes", **more)["launch.yaml"]))
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(document["spec"]) == {"failurePolicy", "replicatedJobs"}
        for each in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}}
            validate.validate(job | each["template"], "1.31", strict=True)
    return documents


def pods_of(document: dict) -> list[dict]:
    jobs = document["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"] for job in jobs]


def test_unlike_hosts_are_jobs_with_their_own_images_and_resources():
    domain = with_kinds(
        PODS, KindLaunch(device="ascend", resource="huawei.com/Ascend910", image="train/npu:1")
    )
    npu = {"device_kind": "ascend", "vendor": "huawei", "devices_per_node": 16}
    of = layout(
        (host("a", domain), WHOLE),
        (host("b", domain, **npu), tuple(range(16))),
        (host("c", domain), WHOLE[:4]),
    )
    (document,) = job_sets(of)
    containers = [pod["containers"][0] for pod in pods_of(document)]
    assert [(each["image"], each["resources"]["limits"]) for each in containers] == [
        ("registry.example.org/train:1.2", {"nvidia.com/gpu": 8}),
        ("train/npu:1", {"huawei.com/Ascend910": 16}),
        ("registry.example.org/train:1.2", {"nvidia.com/gpu": 4}),
    ]
