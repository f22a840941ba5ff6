"""Rank layouts and launches of every shape, without a plan behind them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from hetplan.cluster.launch_domains import KindLaunch, LaunchDomain, Scheduler
from hetplan.schedulers import SCHEDULERS
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import Agent, Host, RankLayout, vendor_environment

NVIDIA = "nvidia-a100-80gb-sxm"
PLAIN = LaunchDomain(name="lab", islands=("a",), ssh_user="trainer", ssh_port=2222)
SLURM = LaunchDomain(
    name="north-slurm",
    islands=("b",),
    scheduler=Scheduler.SLURM,
    partition="gpu",
    account="llm",
    time_limit_seconds=43200.0,
)
PODS = LaunchDomain(
    name="west-pods",
    islands=("c",),
    scheduler=Scheduler.KUBERNETES,
    image="registry.example.org/train:1.2",
    namespace="training",
    fabric_devices=("mlx5_0",),
)


def host(name: str, domain: LaunchDomain = PLAIN, **more: object) -> Host:
    settings = {
        "name": name,
        "address": name,
        "domain": domain,
        "island": domain.islands[0],
        "node": 0,
        "region": "r",
        "device_kind": NVIDIA,
        "vendor": "nvidia",
        "devices_per_node": 8,
    }
    return Host(**settings | more)  # type: ignore[arg-type]


def layout(*parts: tuple[Host, tuple[int, ...]], port: int = 29500) -> RankLayout:
    """Agents in this order, each a host and its local devices."""
    agents, first = [], 0
    for number, (each, devices) in enumerate(parts):
        agents.append(Agent(node_rank=number, host=each, first_rank=first, local_devices=devices))
        first += len(devices)
    return RankLayout(agents=tuple(agents), port=port)


def launch(of: RankLayout, **more: object) -> TrainerLaunch:
    settings = {
        "target": "megatron",
        "title": "a trainer",
        "program": ("pretrain.py",),
        "arguments": (("--first", "1"), ("--folder", "{folder}/x y")),
        "environment": (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),),
        "agent_environment": tuple(vendor_environment(agent) for agent in of.agents),
    }
    return TrainerLaunch(**settings | more)  # type: ignore[arg-type]


WHOLE = tuple(range(8))
MIXED = layout(
    (host("oak"), WHOLE),
    (host("hpc01", SLURM), WHOLE),
    (host("hpc02", SLURM), WHOLE),
    (host("pool-1", PODS), WHOLE),
    (host("pool-2", PODS), WHOLE),
    (host("pine"), WHOLE),
)


def write(folder: Path, files: tuple[EmittedFile, ...]) -> Path:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
        if file.executable:
            path.chmod(0o755)
    return folder


def emitted(
    folder: Path,
    of: RankLayout,
    options: EmissionOptions | None = None,
    **more: object,
) -> Path:
    """The folder of a layout, written."""
    made, options = launch(of, **more), options or EmissionOptions()
    return write(folder, (*SCHEDULERS[options.scheduler].files(of, made, options), *made.files))


def clean_environment(**more: str) -> dict[str, str]:
    """This process' environment without what launch.sh reads."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HETPLAN_", "SLURM", "PET_", "TRAINER_", "MASTER_"))
    }
    return kept | {"OMP_NUM_THREADS": "1"} | more


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Hosts of several domains, kinds and sizes, in any order, some with several agents."""
    domains = [PLAIN, SLURM, PODS, replace(SLURM, name="south"), replace(PODS, name="pods-2")]
    words = st.from_regex(r"[a-z][a-z0-9]{0,4}(-?[0-9]{1,3})?", fullmatch=True)
    names = draw(st.lists(words, min_size=1, max_size=6, unique=True))
    parts: list[tuple[Host, tuple[int, ...]]] = []
    for number, name in enumerate(names):
        vendor = draw(st.sampled_from(["nvidia", "amd"]))
        count = draw(st.sampled_from([1, 2, 4, 8]))
        each = host(
            name,
            draw(st.sampled_from(domains)),
            address=draw(st.sampled_from([name, f"10.0.0.{number}", f"fd00::{number}"])),
            device_kind=f"{vendor}-{count}",
            vendor=vendor,
            devices_per_node=count,
        )
        devices = draw(st.permutations(range(count)))
        cut = draw(st.integers(0, count - 1))
        parts += [(each, tuple(part)) for part in (devices[:cut], devices[cut:]) if part]
    return layout(*draw(st.permutations(parts)))


def with_kinds(domain: LaunchDomain, *kinds: KindLaunch) -> LaunchDomain:
    return replace(domain, kinds=kinds)
