"""check.json holds what a plan needs of its hosts, and which of them send to each other."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest
from preflight_cases import SLOW, sheet_for, two_host_result, two_hosts
from runtime_cases import GPT, job, plan_of

from hetplan.cluster.launch_domains import LaunchDomain, Scheduler
from hetplan.cluster.links import Link, Transport
from hetplan.cluster.spec import Cluster
from hetplan.emitters import preflight
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.preflight import (
    MAX_PAIRS,
    CheckSheet,
    check_sheet,
    preflight_files,
    program_files,
)
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch
from hetplan.files.encoding import encode
from hetplan.files.reading import Document, decode
from hetplan.plans.plan import Plan

LAUNCH = TrainerLaunch(
    target="megatron",
    title="Megatron-LM",
    program=("pretrain_gpt.py",),
    arguments=(),
    environment=(),
    agent_environment=(),
)


def test_hosts_have_their_devices_memory_and_ports() -> None:
    result = two_host_result()
    sheet = sheet_for(result)
    one, two = sheet.hosts
    assert (one.name, one.address, one.devices) == ("one", "127.0.0.1", (0, 1))
    assert (two.name, two.address, two.region) == ("two", "127.0.0.2", "there")
    domains = result.inputs.cluster.launch_domains
    assert (one.first_port, two.first_port) == (domains[0].first_port, domains[1].first_port)
    assert (sheet.port, sheet.barrier_port) == (one.first_port, one.first_port + 1)
    assert one.memory_bytes == result.estimate.stages[0].memory.total_bytes
    assert one.needs_data
    assert two.needs_data
    # Weights and two float32 moments of every parameter.
    assert sheet.checkpoint_bytes == 12 * GPT.parameter_count


def test_a_boundary_is_measured_with_all_of_its_senders() -> None:
    (pair,) = sheet_for(two_host_result()).pairs
    assert (pair.sender, pair.receiver, pair.why) == ("one", "two", "stage 0 to 1")
    # Two devices, one stream each, 5 MB/s each.
    assert (pair.streams, pair.bandwidth_bytes_per_second) == (2, 10e6)
    assert (pair.round_trip_seconds, pair.comparable) == (2e-4, True)
    shared = replace(SLOW, shared_bandwidth_bytes_per_second=6e6)
    (pair,) = sheet_for(two_host_result(shared)).pairs
    assert pair.bandwidth_bytes_per_second == 6e6


def test_a_vendors_own_network_is_not_compared() -> None:
    direct = Link(
        bandwidth_bytes_per_second=5e10,
        latency_seconds=5e-6,
        transport=Transport.DEVICE_DIRECT,
    )
    assert not sheet_for(two_host_result(direct)).pairs[0].comparable


def many_hosts(count: int) -> tuple[Cluster, Plan]:
    """One island of so many hosts with two devices each, all in one data-parallel stage of tp 2."""
    machines = two_hosts()
    island = replace(machines.islands[0], nodes=count, node_names=(f"n[0-{count - 1}]",), name="a")
    machines = Cluster(name="many", islands=(island,), links=())
    plan = plan_of(GPT, job(batch=count), (4,), machines, dp=count, tp=2)
    return machines, plan


@pytest.mark.parametrize("count", [4, MAX_PAIRS + 9])
def test_rings_of_reductions_are_sampled(count: int) -> None:
    machines, plan = many_hosts(count)
    result = two_host_result()
    result = replace(
        result,
        plan=plan,
        inputs=replace(result.inputs, cluster=machines, job=job(batch=count)),
        estimate=replace(result.estimate, stages=result.estimate.stages[:1]),
    )
    sheet = sheet_for(result)
    assert sheet.all_pairs == count
    assert len(sheet.pairs) == min(count, MAX_PAIRS)
    assert all(pair.why == "reduction of layers 0 to 5" for pair in sheet.pairs)
    assert (sheet.pairs[0].sender, sheet.pairs[0].receiver) == ("n0", "n1")
    # Both devices of a host send to those of the next one.
    assert sheet.pairs[0].streams == 2 * preflight.FREE_STREAMS


def test_only_the_ends_of_a_pipeline_read_data() -> None:
    machines = two_hosts()
    islands = (
        *machines.islands,
        replace(machines.islands[0], name="c", node_names=("three",)),
    )
    links = tuple(
        replace(machines.links[0], between=pair) for pair in (("a", "b"), ("a", "c"), ("b", "c"))
    )
    machines = Cluster(name="three", islands=islands, links=links)
    plan = plan_of(GPT, job(), (2, 1, 1), machines, "abc", tp=2, microbatch_size=2)
    result = two_host_result()
    stages = (*result.estimate.stages, result.estimate.stages[0])
    result = replace(
        result,
        plan=plan,
        inputs=replace(result.inputs, cluster=machines),
        estimate=replace(result.estimate, stages=stages),
    )
    sheet = sheet_of(plan, machines)
    asked = check_sheet(result, sheet, EmitOptions(), launch=LAUNCH)
    assert [host.needs_data for host in asked.hosts] == [True, False, True]
    every = check_sheet(result, sheet, EmitOptions(), launch=replace(LAUNCH, target="torchtitan"))
    assert [host.needs_data for host in every.hosts] == [True, True, True]


def test_the_folder_has_the_program_and_its_sheet() -> None:
    result = two_host_result()
    options = EmitOptions(data=("/data/text",), save="/save", trainer_folder="/opt/megatron")
    sheet = sheet_of(result.plan, result.inputs.cluster)
    files = {each.path: each for each in preflight_files(result, sheet, LAUNCH, options)}
    assert set(files) == {each.path for each in program_files()} | {"check.json"}
    assert files["check.py"].executable
    data = json.loads(files["check.json"].text)
    assert (data["program"], data["trainer_folder"]) == ("pretrain_gpt.py", "/opt/megatron")
    assert (data["data"], data["save"], data["needs_torch"]) == (["/data/text"], "/save", True)
    document = Document(file="check.json", text="", root=data, sha256="")
    read = decode(document, CheckSheet, schema=preflight.SCHEMA)
    assert encode(read, schema=preflight.SCHEMA) == files["check.json"].text


def test_a_program_that_is_no_file_of_the_trainer_is_not_looked_for() -> None:
    result = two_host_result()
    sheet = sheet_of(result.plan, result.inputs.cluster)
    for program in (("-m", "torchtitan.train"), ("{folder}/train.py",), ("/opt/train.py",)):
        launch = replace(LAUNCH, program=program)
        assert check_sheet(result, sheet, EmitOptions(), launch=launch).program == ""


def test_hosts_in_containers_are_known() -> None:
    result = two_host_result()
    pods = LaunchDomain(
        name="pods",
        islands=("b",),
        scheduler=Scheduler.KUBERNETES,
        image="example.com/train:1",
        first_port=29500,
        last_port=29600,
    )
    domains = (result.inputs.cluster.launch_domains[0], pods)
    cluster = replace(result.inputs.cluster, launch_domains=domains)
    islands = tuple(
        replace(island, device=replace(island.device, kind="cpu", vendor="nvidia"))
        for island in cluster.islands
    )
    cluster = replace(cluster, islands=islands)
    changed = replace(result, inputs=replace(result.inputs, cluster=cluster))
    assert [host.container for host in sheet_for(changed).hosts] == [False, True]


@pytest.mark.parametrize("file", program_files(), ids=lambda file: file.path)
def test_the_program_is_python_3_6(file) -> None:
    tree = ast.parse(file.text, feature_version=(3, 6))
    known = {
        "argparse", "contextlib", "csv", "errno", "io", "json", "os", "re", "resource", "select",
        "shutil", "socket", "statistics", "subprocess", "sys", "threading", "time", "typing",
        "uuid",
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= known
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module in known or node.module.startswith("check_")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # Came with Python 3.7.
            assert not {"capture_output", "text"} & {each.arg for each in node.keywords}
