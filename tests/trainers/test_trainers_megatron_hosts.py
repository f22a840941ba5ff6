"""Networks of groups, timeouts and the environment of a Megatron-LM launch."""

from __future__ import annotations

import re
from importlib.metadata import files

import pytest
import yaml
from trainer_models import device
from trainer_plans import (
    STAGED,
    cluster,
    island,
    launched,
    megatron,
    random_results,
    stage_per_island,
)

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.schedulers.rank_layout import Agent, Host, vendor_environment
from hetplan.trainers.megatron.parallel import group_networks


def test_only_the_groups_that_are_staged_get_sockets() -> None:
    """Two nodes a stage in two regions: pipelines cross, data-parallel groups stay inside."""
    result = stage_per_island(
        cluster(island("a", "n"), island("b", "s"), across=STAGED, fabric=("mlx5_0",)),
        3,
        5,
        tp=8,
        dp=2,
    )
    launch = launched(result)
    (file,) = launch.files
    networks = yaml.safe_load(file.text)
    sockets = {name for name, each in networks.items() if each == {"net_name": "Socket"}}
    assert sockets == {"pp", "embd", "mp", "intra_dist_opt_instance"}
    assert {name: networks[name] for name in networks if name not in sockets} == {
        name: {"net_name": "IB"} for name in ("dp", "dp_cp", "tp_dp", "tp_dp_cp")
    }
    assert ("--nccl-communicator-config-path", "{folder}/transport.yaml") in launch.arguments
    assert any("NCCL_NET=Socket" in remark for remark in launch.remarks)


def test_names_of_groups_are_megatrons() -> None:
    """Every name is one that the wheel asks get_nccl_options for."""
    (source,) = (
        file.read_text()
        for file in files("megatron-core") or ()
        if file.as_posix() == "megatron/core/parallel_state.py"
    )
    known = set(re.findall(r'get_nccl_options\("(\w+)"', source))
    named = {
        network.group
        for result in random_results(megatron, seed=5, count=100)
        for network in group_networks(result.plan, result.inputs.cluster)
    }
    assert named <= known
    assert {"pp", "dp", "mp", "ep", "ep_dp", "tp_ep_pp", "embd"} <= named


# ---- environment


def agent(kind: str, domain: LaunchDomain, local: tuple[int, ...]) -> Agent:
    found = device(kind)
    host = Host(
        name="h",
        address="h",
        domain=domain,
        island="i",
        node=0,
        region="r",
        device_kind=kind,
        vendor=found.vendor,
        devices_per_node=8,
    )
    return Agent(node_rank=0, host=host, first_rank=0, local_devices=local)


PLAIN = LaunchDomain(
    name="d", islands=("i",), interface="eth0", fabric_devices=("mlx5_0", "mlx5_1")
)
WHOLE = tuple(range(8))


@pytest.mark.parametrize(
    ("kind", "local", "wanted"),
    [
        (
            "nvidia-h100-80gb-sxm",
            WHOLE,
            {
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_SOCKET_IFNAME": "=eth0",
                "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
            },
        ),
        (
            "huawei-ascend-910b2-64gb",
            (0, 1),
            {
                "GLOO_SOCKET_IFNAME": "eth0",
                "HCCL_SOCKET_IFNAME": "=eth0",
                "ASCEND_RT_VISIBLE_DEVICES": "0,1",
            },
        ),
    ],
)
def test_every_vendor_has_its_own_names(
    kind: str, local: tuple[int, ...], wanted: dict[str, str]
) -> None:
    assert dict(vendor_environment(agent(kind, PLAIN, local))) == wanted
