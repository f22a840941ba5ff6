"""A plan as a launch of FlagScale: its YAML file, a hostfile, and the same as arguments.

FlagScale's configuration has two parts: the experiment (hosts, environment, runner) and what is
trained, in sections `system`, `model` and `data`. Its examples (examples/aquila/conf) keep them in
two files that Hydra joins; its runner reads `config.train` wherever it came from. It puts the three
sections together and flattens them (flagscale/runner/utils.py, flatten_dict_to_args): names of
nested sections are dropped, `_` becomes `-`, lists become values behind a flag, true a flag alone,
false nothing. A value of null would become the word None, so none is written.

The runner (flagscale/runner/runner_train.py) reads `host slots=N type=T` lines, takes their order
for node ranks, and starts by ssh on each host a script that it writes: it exports the environment
in front of torchrun and pastes the whole command between double quotes, with the name of the type
of the host's line. A host has one line, so one agent. It needs a variable that ends in
_VISIBLE_DEVICES for every host (run_node reads what it set only where there is one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetplan.cluster.launch_domains import Scheduler
from hetplan.cluster.links import Transport
from hetplan.plans.plan import Plan
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.quoting import FOLDER, file_name, yaml_text
from hetplan.schedulers.rank_layout import Agent, RankLayout
from hetplan.schedulers.vendors import vendor_of
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.flagscale.meshes import (
    DEVICE_TYPE,
    PORTED_VENDORS,
    Mesh,
    Meshes,
    agent_types,
    flagscale_arguments,
    flagscale_faults,
    meshes_of,
    transports_between,
)
from hetplan.trainers.megatron.flags import FLAGS
from hetplan.trainers.megatron.model import model_faults, numerics_remarks
from hetplan.trainers.megatron.parallel import degrees_of
from hetplan.trainers.megatron.write import (
    agent_environment,
    launch_remarks,
    transport_files,
)

FOLDER_VARIABLE = "HETPLAN_FOLDER"
FOLDER_OF_YAML = f"${{oc.env:{FOLDER_VARIABLE}}}"
"""OmegaConf's words for the variable that holds the emitted folder's place."""

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", re.ASCII)
_DATA = re.compile(r"data-path|split|mock-data|.*tokenizer.*|.*vocab.*")
_NESTED = (
    ("hetero", re.compile(r"enable-hetero|hetero-.*|expert-tensor-.*-mesh|use-partial-.*")),
    ("recompute", re.compile(r"recompute-.*")),
    ("precision", re.compile(r"bf16|fp16|fp8-.*|fp4-.*|.*grads.*|grad-reduce-.*")),
    ("checkpoint", re.compile(r"save|save-interval|load|ckpt-format")),
    ("logging", re.compile(r"log-.*|timing-.*|no-barrier-.*")),
)
"""Sections inside `system`; everything else is directly in it."""


def train_config(arguments: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The arguments as the sections that FlagScale flattens."""
    found: dict[str, Any] = {"system": {}, "model": {}, "data": {}}
    for flag, *values in arguments:
        name = flag.removeprefix("--")
        home = found["data" if _DATA.fullmatch(name) else _section(name)]
        inner = next((key for key, those in _NESTED if those.fullmatch(name)), None)
        if home is found["system"] and inner is not None:
            home = home.setdefault(inner, {})
        home[name.replace("-", "_")] = _value(name, values)
    return found


def _section(name: str) -> str:
    """Where people look for a flag: shapes in `model`, everything else in `system`."""
    return "model" if name in FLAGS and FLAGS[name].meaning.startswith("model:") else "system"


_LISTS = re.compile(
    r"hetero-(?:process-meshes|pipeline-layer-split|device-types)|data-path|.*-mesh|.*-micro-batch"
)
_ROWS = re.compile(r".*-per-stage-micro-batch")


def _value(name: str, values: Sequence[str]) -> Any:
    if not values:
        return True
    read = json.loads if _ROWS.fullmatch(name) else _scalar
    found = [read(each) for each in values]
    return found if len(found) > 1 or _LISTS.fullmatch(name) else found[0]


def _scalar(text: str) -> Any:
    if _NUMBER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and repr(float(text)) == text:
        return float(text)
    return text.replace(FOLDER, FOLDER_OF_YAML)


def flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The arguments of sections, in their order, as FlagScale's runner makes them."""
    for name, value in config.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            yield from flatten(value)
        elif isinstance(value, list):
            yield flag, *(str(each) for each in value)
        elif value is True:
            yield (flag,)
        elif value is not False:
            yield flag, str(value)


def arguments_of(config: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Every argument of the three sections, `{folder}` for the folder."""
    merged: dict[str, Any] = {}
    for section in ("system", "model", "data"):
        merged.update(config[section])
    return tuple(
        tuple(word.replace(FOLDER_OF_YAML, FOLDER) for word in each) for each in flatten(merged)
    )


# ---- flagscale/hosts

EXPERIMENT, HOST_FILE = "flagscale", "hostfile"
PROGRAM = "flagscale/train/train_gpt.py"

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""What shlex.quote leaves as it is: quoted assignments would be taken for a command."""


def host_file(ranks: RankLayout, types: Sequence[str]) -> str:
    """Lines of the hostfile; without types where there are none."""
    lines = []
    for agent, name in zip(ranks.agents, types, strict=True):
        end = f" type={name}" if name else ""
        lines.append(f"{agent.host.address} slots={agent.num_ranks}{end}\n")
    return "".join(lines)


def one_agent_each(ranks: RankLayout) -> bool:
    """Whether no host has two agents, for which a hostfile has no words."""
    return len(ranks.hosts) == len(ranks.agents)


def runner_obstacles(
    ranks: RankLayout, environment: Sequence[Sequence[tuple[str, str]]]
) -> Iterator[str]:
    """Why FlagScale's own runner cannot start this launch; nothing where it can."""
    if not one_agent_each(ranks):
        yield "a host runs several agents, and a hostfile has one line for it"
    others = {
        host.domain.scheduler.value
        for host in ranks.hosts
        if host.domain.scheduler is not Scheduler.HOSTS
    }
    if others:
        yield f"hosts are started by {', '.join(sorted(others))}, and it starts all by ssh"
    if len({host.domain.ssh_port for host in ranks.hosts}) > 1:
        yield "domains have ssh ports of their own, and it takes one for all"
    for agent in ranks.agents:
        if not visible_name(agent):
            yield (
                f"no variable is known that says which devices of {agent.host.device_kind} a "
                "process sees"
            )
            break
    if any(not _PLAIN.fullmatch(value) for each in environment for _, value in each):
        yield "the environment has values that it would have to quote, which it does wrongly"


def visible_name(agent: Agent) -> str:
    """The variable that limits devices, where its name is one that the runner looks for."""
    name = vendor_of(agent.host.vendor, agent.host.device_kind).visible
    return name if name.endswith("_VISIBLE_DEVICES") else ""


def node_environment(
    ranks: RankLayout, environment: Sequence[Sequence[tuple[str, str]]]
) -> dict[str, dict[str, str]]:
    """Environment of every host by its name in the hostfile, with its devices."""
    found: dict[str, dict[str, str]] = {}
    for agent, variables in zip(ranks.agents, environment, strict=True):
        own = dict(variables)
        name = visible_name(agent)
        if name:
            own.setdefault(name, ",".join(map(str, agent.local_devices)))
        found[agent.host.address] = own
    return found


def experiment_config(
    ranks: RankLayout,
    name: str,
    nodes: Mapping[str, Mapping[str, str]],
    train: Mapping[str, Any],
) -> dict[str, Any]:
    """The experiment: where it writes, how it is started, what every host sees and trains."""
    return {
        "experiment": {
            "exp_name": name,
            "exp_dir": f"{FOLDER_OF_YAML}/run",
            "task": {"type": "train", "backend": "megatron", "entrypoint": PROGRAM},
            "runner": {
                "backend": "torchrun",
                "hostfile": f"{FOLDER_OF_YAML}/{HOST_FILE}",
                # Meshes want static rendezvous, which alone keeps the order of hosts.
                "rdzv_backend": "static",
                "ssh_port": ranks.master.domain.ssh_port,
                "master_addr": ranks.master.address,
                "master_port": ranks.port,
            },
            "envs": {"node_specific": {host: dict(each) for host, each in nodes.items()}},
        },
        "train": train,
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }


# ---- flagscale/trainer

TITLE = "FlagScale (commit da4935ec of 13 Nov 2025, with Megatron-LM 8479eb35)"
_MEGATRON = "third_party/Megatron-LM"
"""Where FlagScale's build puts its patched Megatron-LM (runner_train.py, megatron_dir)."""


def flagscale_launch(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    """The launch of a result without faults."""
    meshes = meshes_of(result.plan, ranks)
    types = agent_types(meshes.meshes, ranks) if meshes.hetero else ("",) * len(ranks.agents)
    config = train_config(flagscale_arguments(result, ranks, meshes, options))
    environment = tuple(
        agent_environment(
            agent,
            replace(degrees_of(result.plan), tp=_most_tp(agent, meshes)),
            result.inputs.job,
        )
        for agent in ranks.agents
    )
    nodes = node_environment(ranks, environment)
    experiment = experiment_config(ranks, file_name(result.inputs.job.name), nodes, config)
    obstacles = tuple(runner_obstacles(ranks, [tuple(each.items()) for each in nodes.values()]))
    files = [EmittedFile(path=f"{EXPERIMENT}.yaml", text=yaml_text(experiment))]
    if one_agent_each(ranks):
        files.append(EmittedFile(path=HOST_FILE, text=host_file(ranks, types)))
    return TrainerLaunch(
        target="flagscale",
        title=TITLE,
        program=(PROGRAM,),
        arguments=arguments_of(config),
        environment=(("PYTHONPATH", _python_path(options.trainer_folder)),),
        agent_environment=environment,
        agent_arguments=tuple(((DEVICE_TYPE, name),) for name in types) if meshes.hetero else (),
        files=(*files, *(() if meshes.hetero else transport_files(result, ranks))),
        remarks=(
            *_remarks(result.plan, ranks, meshes),
            *(
                numerics_remarks(result.inputs.model)
                if meshes.hetero
                else launch_remarks(result, ranks, options)
            ),
            *(
                f"FlagScale's own runner cannot start this: {each}; launch.sh can."
                for each in obstacles
            ),
        ),
        own_runner=() if obstacles else _own_runner(options),
    )


def _own_runner(options: EmissionOptions) -> tuple[str, ...]:
    """FlagScale's README: python run.py with the folder and name of the experiment."""
    return (
        "env",
        f"{FOLDER_VARIABLE}={FOLDER}",
        options.python,
        "run.py",
        "--config-path",
        FOLDER,
        "--config-name",
        EXPERIMENT,
        "action=run",
    )


def _python_path(trainer_folder: str) -> str:
    """As the runner sets it; without a folder relative to the one where the program starts."""
    if not trainer_folder:
        return f"{_MEGATRON}:."
    return f"{trainer_folder.rstrip('/')}/{_MEGATRON}:{trainer_folder}"


def _most_tp(agent: Agent, meshes: Meshes) -> int:
    """The largest tp of the ranks of an agent."""
    stop = agent.first_rank + agent.num_ranks
    return max(
        mesh.tp
        for mesh in meshes.meshes
        if mesh.first_rank < stop and agent.first_rank < mesh.first_rank + mesh.num_ranks
    )


def _remarks(plan: Plan, ranks: RankLayout, meshes: Meshes) -> Iterator[str]:
    if meshes.hetero:
        yield f"Meshes, in pipeline order: {'; '.join(_mesh_text(each) for each in meshes.meshes)}."
        yield (
            "Checkpoints have FlagScale's format torch, as meshes need it. Such a checkpoint is "
            "bound to this plan: it cannot be resharded, so a run cannot go on under another plan "
            "or with other devices."
        )
        yield from _transport_remarks(plan, meshes)
    else:
        yield (
            "One mesh suffices: the configuration is Megatron-LM's, without --enable-hetero, and "
            "checkpoints (torch_dist) can be read under other plans."
        )
    yield (
        "FlagScale's own runner always gives --save and --load, by default run/checkpoints in this "
        "folder: it writes a checkpoint at the end, from which a second start goes on. "
        "launch.sh gives them only where they were asked for."
    )
    ported = {each.device_kind for each in ranks.hosts if each.vendor in PORTED_VENDORS}
    if ported:
        yield (
            f"Hosts with {', '.join(sorted(ported))} need FlagScale's port to them (its folder "
            "hardware/), built there; device_type_specific build_dir says where."
        )
    unported = {each.device_kind for each in ranks.hosts if each.vendor == "amd"}
    if unported:
        yield (
            f"FlagScale has no port of its own for {', '.join(sorted(unported))}: there torch "
            "for ROCm takes CUDA's place, which was not tried."
        )


def _mesh_text(mesh: Mesh) -> str:
    last = mesh.first_stage + mesh.pp - 1
    stages = f"stage {last}" if mesh.pp == 1 else f"stages {mesh.first_stage}-{last}"
    return (
        f"{stages} on {mesh.device_kind} (type {mesh.device_type}), tp {mesh.tp}, dp {mesh.dp}, "
        f"microbatch size {mesh.microbatch_size}"
    )


def _transport_remarks(plan: Plan, meshes: Meshes) -> Iterator[str]:
    between = transports_between(plan, meshes.meshes)
    if meshes.cpu_communication:
        yield "Meshes send each other through the hosts' memory (gloo)."
        others = [each for each in between if each != Transport.HOST_STAGED]
        how = "directly"
    else:
        others = [each for each in between if each == Transport.HOST_STAGED]
        how = "through the hosts' memory"
    if others:
        yield (
            f"The plan has {len(others)} of {len(between)} boundaries between meshes {how}; "
            "FlagScale has one way for all of them."
        )


TRAINER = Trainer(
    name="flagscale",
    plan_target="flagscale",
    faults=flagscale_faults,
    question_faults=model_faults,
    launch=flagscale_launch,
)
