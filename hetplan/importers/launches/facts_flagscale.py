"""What does a launch of FlagScale ask for: meshes of stages, each with degrees of its own?

flagscale/train/arguments.py (pre_validate_args) of FlagScale da4935ec: five numbers for each mesh
(tp, cp, ep, dp, pp); the first mesh's dp is that by which --micro-batch-size is read, another has
dp0 x size / dp. Without `enable_hetero` it is Megatron-LM.
"""

from __future__ import annotations

import json

from hetplan.errors import InputError
from hetplan.importers.launches.facts_megatron import (
    common_facts,
    megatron_facts,
    microbatch_size,
    recompute_of,
    world_size,
)
from hetplan.importers.launches.flags import count_of, fault_of, flag, is_set, number_of, wrong
from hetplan.importers.launches.layers import MAX_STAGES, stage_layers
from hetplan.importers.launches.values import LaunchFacts, LaunchMesh, LaunchText, Setting
from hetplan.importers.lines import whole_number
from hetplan.plans.plan import Recompute, RecomputeGranularity


def flagscale_facts(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; an InputError where meshes are none, or do not make up the launch's ranks."""
    if not is_set(text, "enable-hetero"):
        return megatron_facts(text, num_layers)
    meshes = _meshes(text)
    pp = sum(mesh.pp for mesh in meshes)
    said = number_of(text, None, "num-layers")
    layers = _layers(text, pp, num_layers if said is None else said)
    world = sum(mesh.tp * mesh.cp * mesh.dp * mesh.pp for mesh in meshes)
    if text.hosts or text.nodes is not None:
        _check_world(text, world)
    return common_facts(
        text,
        world=world,
        meshes=meshes,
        layers=layers,
        num_layers=said,
        stage_recompute=_recompute(text, pp, layers),
        # Sends overlap with virtual stages only, which meshes do not have.
        sends=False,
    )


def _check_world(text: LaunchText, world: int) -> None:
    """parallel_context.py raises where the meshes do not have as many ranks as were started."""
    started = world_size(text)
    if started != world:
        setting = flag(text, "hetero-process-meshes")
        message = f"the meshes have {world} ranks, the hosts start {started}"
        raise InputError(fault_of(setting, text, message))


def _numbers(setting: Setting) -> list[int]:
    """The whole numbers of a list, which stand in one value or in many."""
    found: list[int] = []
    for value in setting.values:
        for part in value.strip("[] ").replace(",", " ").split():
            number = whole_number(part)
            if number is None or not 0 <= number <= 10**9:
                raise InputError(wrong(setting, "a list of whole numbers"))
            found.append(number)
    return found


def _meshes(text: LaunchText) -> tuple[LaunchMesh, ...]:
    setting = flag(text, "hetero-process-meshes")
    if setting is None:
        message = "enable_hetero needs hetero_process_meshes: tp, cp, ep, dp, pp of each mesh"
        raise InputError(fault_of(flag(text, "enable-hetero"), text, message))
    numbers = _numbers(setting)
    if not numbers or len(numbers) % 5 or 0 in numbers:
        message = f"{len(numbers)} numbers; each mesh has five from 1 on: tp, cp, ep, dp, pp"
        raise InputError(fault_of(setting, text, message))
    rows = [numbers[at : at + 5] for at in range(0, len(numbers), 5)]
    if sum(row[4] for row in rows) > MAX_STAGES:
        raise InputError(fault_of(setting, text, "more stages than a model has layers"))
    types = flag(text, "hetero-device-types")
    names = _names(types) if types is not None else []
    if names and len(names) != len(rows):
        message = f"{len(names)} device types for {len(rows)} meshes; each mesh has one"
        raise InputError(fault_of(types, text, message))
    experts = flag(text, "expert-tensor-parallel-size-per-process-mesh")
    per_mesh = _numbers(experts) if experts is not None else []
    if per_mesh and len(per_mesh) != len(rows):
        raise InputError(fault_of(experts, text, f"{len(per_mesh)} numbers for {len(rows)} meshes"))
    size = microbatch_size(text)
    found = []
    for at, (tp, cp, ep, dp, pp) in enumerate(rows):
        sequences = rows[0][3] * size
        if sequences % dp:
            message = (
                f"dp {dp} of mesh {at} does not divide dp {rows[0][3]} of the first mesh x "
                f"micro_batch_size {size}"
            )
            raise InputError(fault_of(setting, text, message))
        etp = per_mesh[at] if per_mesh else count_of(text, tp, "expert-tensor-parallel-size")
        found.append(
            LaunchMesh(
                tp=tp,
                cp=cp,
                ep=ep,
                dp=dp,
                pp=pp,
                microbatch_size=sequences // dp,
                etp=max(1, etp),
                device_type=names[at] if names else "",
            )
        )
    return tuple(found)


def _names(setting: Setting) -> list[str]:
    found: list[str] = []
    for value in setting.values:
        found += [part.strip("\"' ") for part in value.strip("[]").split(",") if part.strip()]
    return found


def _layers(text: LaunchText, pp: int, num_layers: int | None) -> tuple[tuple[int, ...], ...]:
    split = flag(text, "hetero-pipeline-layer-split")
    if split is None:
        # pre_validate_args: num_layers // stages on each, whatever is left over.
        if num_layers is not None:
            return ((num_layers // pp,),) * pp
        return stage_layers(text, pp, num_layers)
    counts = _numbers(split)
    if len(counts) != pp:
        message = f"{len(counts)} numbers for {pp} stages"
        raise InputError(fault_of(split, text, message))
    return tuple((count,) for count in counts)


def _recompute(
    text: LaunchText, pp: int, layers: tuple[tuple[int, ...], ...]
) -> tuple[Recompute, ...]:
    """Of each stage: recompute_granularity_per_stage_micro_batch and its companions.

    transformer_block.py (patched): granularity 1 is full, 0 none; method 0 uniform, 1 block; a
    number of layers of 0 is none.
    """
    common = recompute_of(text)
    rows = _stage_values(text, "recompute-granularity-per-stage-micro-batch", pp)
    if rows is None:
        return (common,) * pp
    methods = _stage_values(text, "recompute-method-per-stage-micro-batch", pp)
    counts = _stage_values(text, "recompute-num-layers-per-stage-micro-batch", pp)
    block = common.layers is not None
    found = []
    for stage in range(pp):
        number = counts[stage] if counts is not None else common.layers
        is_block = methods[stage] == 1 if methods is not None else block
        if not rows[stage] or number == 0:
            found.append(Recompute())
            continue
        found.append(
            Recompute(
                granularity=RecomputeGranularity.FULL,
                layers=number if is_block and number is not None else None,
            )
        )
    del layers
    return tuple(found)


def _stage_values(text: LaunchText, name: str, pp: int) -> list[int] | None:
    """The one value of each stage; lists are [stages, microbatches, value, microbatches, value].

    An InputError where the microbatches of a stage differ, which plans cannot say.
    """
    setting = flag(text, name)
    if setting is None:
        return None
    found: list[int] = []
    for row in _rows(setting):
        if len(row) < 3 or len(row) % 2 == 0 or row[0] > MAX_STAGES:
            raise InputError(wrong(setting, "lists [stages, microbatches, value, ...]"))
        values = {value for count, value in zip(row[1::2], row[2::2], strict=True) if count}
        if len(values) != 1:
            message = (
                f"{list(row)} treats the microbatches of a stage differently; plans have one way "
                "for all of a stage's: give the value of most of them"
            )
            raise InputError(fault_of(setting, text, message))
        found += [*values] * row[0]
    if len(found) != pp:
        raise InputError(fault_of(setting, text, f"speaks of {len(found)} stages; there are {pp}"))
    return found


def _rows(setting: Setting) -> list[list[int]]:
    rows: list[list[int]] = []
    for value in setting.values:
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= 10**9
            for each in read
        ):
            raise InputError(wrong(setting, "lists of whole numbers"))
        rows.append(read)
    return rows
