"""A plan as a launch of FlagScale: its two YAML files, a hostfile, and the same as arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.cluster.links import Transport
from hetplan.emitters.flagscale.arguments import agent_device_types, flagscale_arguments
from hetplan.emitters.flagscale.configs import FOLDER_VARIABLE, arguments_of, train_config
from hetplan.emitters.flagscale.faults import PORTED_VENDORS, flagscale_faults
from hetplan.emitters.flagscale.hosts import (
    EXPERIMENT,
    EXPERIMENT_FILE,
    HOST_FILE,
    PROGRAM,
    TRAIN_FILE,
    experiment_config,
    host_file,
    node_environment,
    one_agent_each,
    runner_obstacles,
)
from hetplan.emitters.flagscale.meshes import (
    Mesh,
    Meshes,
    agent_types,
    meshes_of,
    transports_between,
)
from hetplan.emitters.megatron.environment import agent_environment
from hetplan.emitters.megatron.numerics import numerics_remarks
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.megatron.trainer import launch_remarks, transport_files
from hetplan.emitters.quoting import FOLDER, file_name, yaml_text
from hetplan.emitters.sheet import Agent, LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.plans.plan import Plan
from hetplan.search.result import SearchResult

TITLE = "FlagScale (commit da4935ec of 13 Nov 2025, with Megatron-LM 8479eb35)"
_MEGATRON = "third_party/Megatron-LM"
"""Where FlagScale's build puts its patched Megatron-LM (runner_train.py, megatron_dir)."""


def flagscale_launch(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> TrainerLaunch:
    """The launch of a result without faults."""
    meshes = meshes_of(result.plan, sheet)
    types = agent_types(meshes.meshes, sheet) if meshes.hetero else ("",) * len(sheet.agents)
    config = train_config(flagscale_arguments(result, sheet, meshes, options))
    environment = tuple(
        agent_environment(agent, replace(degrees_of(result.plan), tp=_most_tp(agent, meshes)))
        for agent in sheet.agents
    )
    nodes = node_environment(sheet, environment)
    experiment = experiment_config(sheet, file_name(result.inputs.job.name), nodes)
    obstacles = tuple(runner_obstacles(sheet, [tuple(each.items()) for each in nodes.values()]))
    files = [
        EmittedFile(path=EXPERIMENT_FILE, text=yaml_text(experiment)),
        EmittedFile(path=TRAIN_FILE, text=yaml_text(config)),
    ]
    if one_agent_each(sheet):
        files.append(EmittedFile(path=HOST_FILE, text=host_file(sheet, types)))
    return TrainerLaunch(
        target="flagscale",
        title=TITLE,
        program=(PROGRAM,),
        arguments=arguments_of(config),
        environment=(("PYTHONPATH", _python_path(options.trainer_folder)),),
        agent_environment=environment,
        agent_arguments=agent_device_types(types) if meshes.hetero else (),
        files=(*files, *(() if meshes.hetero else transport_files(result, sheet))),
        remarks=(
            *_remarks(result.plan, sheet, meshes),
            *(
                numerics_remarks(result.inputs.model)
                if meshes.hetero
                else launch_remarks(result, sheet, options)
            ),
            *(
                f"FlagScale's own runner cannot start this: {each}; start-all.sh can."
                for each in obstacles
            ),
        ),
        own_runner=() if obstacles else _own_runner(options),
    )


def _own_runner(options: EmitOptions) -> tuple[str, ...]:
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


def _remarks(plan: Plan, sheet: LaunchSheet, meshes: Meshes) -> Iterator[str]:
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
        "start-here.sh gives them only where they were asked for."
    )
    ported = {each.device_kind for each in sheet.hosts if each.vendor in PORTED_VENDORS}
    if ported:
        yield (
            f"Hosts with {', '.join(sorted(ported))} need FlagScale's port to them (its folder "
            "hardware/), built there; device_type_specific build_dir says where."
        )
    unported = {each.device_kind for each in sheet.hosts if each.vendor == "amd"}
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
    launch=flagscale_launch,
)
