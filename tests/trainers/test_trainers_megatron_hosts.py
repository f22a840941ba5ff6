"""Networks of groups, timeouts and the environment of a Megatron-LM launch."""

from __future__ import annotations

import re
from importlib.metadata import files

import yaml
from trainer_plans import (
    STAGED,
    cluster,
    island,
    launched,
    megatron,
    random_results,
    stage_per_island,
)

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
