"""What a FlagScale experiment asks for: its YAML with a train YAML beside it, and a hostfile.

    defaults: [{train: aquila}]      conf/train/aquila.yaml, as Hydra finds it
    experiment.runner.hostfile       hosts with slots= and, for meshes, type=

Interpolations `${a.b}` and `${oc.env:NAME,default}` are followed as OmegaConf does; what only an
environment knows stays unread, except HETPLAN_FOLDER, the folder of the file.

Meshes are runs of stages with degrees of their own: flagscale/train/arguments.py
(pre_validate_args) of FlagScale da4935ec. Each has five numbers (tp, cp, ep, dp, pp); the dp of the
first is that by which --micro-batch-size is read, another mesh has dp0 x size / dp. Without
`enable_hetero` it is Megatron-LM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files.reading import Document, read_document, read_text
from hetplan.importers.hostfile import parse
from hetplan.importers.lines import fault_at, shown, whole_number
from hetplan.importers.records import ImportContext
from hetplan.plans.plan import Recompute, RecomputeGranularity
from hetplan.trainers.launch_values import (
    GIVEN_FILE,
    MAX_STAGES,
    Given,
    LaunchFacts,
    LaunchHost,
    LaunchMesh,
    LaunchText,
    Setting,
    count_of,
    fault_of,
    flag,
    is_set,
    number_of,
    rank_count,
    tree_leaves,
    visible_devices,
    world_size,
    wrong,
)
from hetplan.trainers.megatron.read import (
    common_facts,
    megatron_facts,
    microbatch_size,
    recompute_of,
    stage_layers,
)

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 8
_FOLDER = "HETPLAN_FOLDER"
_MAIN = ("experiment", "train", "defaults")


def flagscale_launch(
    path: Path, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """What an experiment, or a train YAML alone, says; `hosts` count instead of its hostfile.

    An InputError where a file is missing or no YAML.
    """
    document = read_document(path)
    if not isinstance(document.root, dict):
        raise fault_at(str(path), 1, "is no FlagScale experiment: a mapping is expected here")
    if any(key in document.root for key in ("experiment", "defaults", "train")):
        settings = [*tree_settings(document), *_train_settings(document, path)]
    else:
        settings = [*tree_settings(document, "train")]
    settings = [each for each in settings if not each.name.startswith(("defaults", "hydra"))]
    settings += [
        Setting(
            name=name if name.startswith(_MAIN) else f"train.{name}",
            values=tuple(value.strip("[]").split(",")) if "[" in value else (value,),
            file=GIVEN_FILE,
            line=at,
        )
        for at, (name, value) in enumerate(given, start=1)
        if not name.isidentifier()
    ]
    environment = {name: value for name, value in given if name.isidentifier()}
    environment.setdefault(_FOLDER, str(path.parent))
    known, unread = _resolved(settings, environment)
    text = LaunchText(trainer="flagscale", settings=known)
    hosts = hosts or tuple(_with_devices(known, host) for host in _hosts(text, path))
    return replace(
        text,
        hosts=hosts,
        nodes=len(hosts) or _count(text, "nnodes"),
        devices_per_node=_count(text, "nproc_per_node"),
        unread=unread,
    )


def _train_settings(document: Document, path: Path) -> list[Setting]:
    """Of the train YAML that `defaults` names; none where the experiment holds `train` itself."""
    found: list[Setting] = []
    for at in document.entries(("defaults",)):
        name = document.word(("defaults", at, "train"))
        if name is None:
            continue
        if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", name) or ".." in name:
            message = f"{shown(name)} is no name of a train YAML"
            raise fault_at(str(path), document.line(("defaults", at)), message, "defaults")
        train = path.parent / "train" / f"{name}.yaml"
        if not train.exists():
            message = f"names {shown(str(train))}, which is not there"
            raise fault_at(str(path), document.line(("defaults", at)), message, "defaults")
        found += tree_settings(read_document(train), "train")
    return found


def _resolved(
    settings: list[Setting], environment: dict[str, str]
) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Settings with their interpolations followed, and those that only a host can follow."""
    by_name = {each.name: each for each in settings}
    known: list[Setting] = []
    unread: list[Setting] = []
    for each in settings:
        values = tuple(_followed(value, by_name, environment) for value in each.values)
        setting = replace(each, values=values)
        missing = any(_INTERPOLATION.search(value) or value == "???" for value in values)
        (unread if missing else known).append(setting)
    return tuple(known), tuple(unread)


def _followed(value: str, by_name: dict[str, Setting], environment: dict[str, str]) -> str:
    def inner(found: re.Match[str]) -> str:
        name = found.group(1).strip()
        if name.startswith("oc.env:"):
            variable, comma, default = name.removeprefix("oc.env:").partition(",")
            if variable.strip() in environment:
                return environment[variable.strip()]
            return default.strip() if comma else found.group()
        setting = by_name.get(name)
        return setting.values[0] if setting is not None and setting.values else found.group()

    for _ in range(_MAX_ROUNDS):
        after = _INTERPOLATION.sub(inner, value)
        if after == value or len(after) > 10_000:
            break
        value = after
    return value


def _hosts(text: LaunchText, path: Path) -> tuple[LaunchHost, ...]:
    """Hosts of the runner's hostfile, where the file is there."""
    setting = text.last("experiment.runner.hostfile")
    if setting is None or setting.values[:1] in ((), ("null",), ("",)):
        return ()
    try:
        names = (Path(setting.values[0]), path.parent / setting.values[0])
        file = next((name for name in names if name.is_file()), None)
    except (OSError, ValueError):
        file = None
    return () if file is None else hosts_of_file(file)


def _with_devices(settings: tuple[Setting, ...], host: LaunchHost) -> LaunchHost:
    """The host with its devices, where the environment of host, type or all hosts names them."""
    for place in (f"node_specific.{host.name}.", f"device_type_specific.{host.type}.", ""):
        prefix = f"experiment.envs.{place}"
        for each in reversed(settings):
            name = each.name.removeprefix(prefix)
            if name == each.name or "." in name or not name.endswith("_VISIBLE_DEVICES"):
                continue
            # YAML may hold the numbers as one text or as a list.
            found = visible_devices(",".join(each.values))
            if host.devices is not None and len(found) >= host.devices:
                return replace(host, local_devices=found[: host.devices])
    return host


def hosts_of_file(path: Path) -> tuple[LaunchHost, ...]:
    """Hosts of a hostfile in its order; an InputError where it is none."""
    text = read_text(path)
    imported = parse(text, ImportContext(file=str(path)))
    lines = text.split("\n")
    return tuple(
        LaunchHost(
            name=host.name,
            devices=host.slots,
            type=host.device or "",
            file=str(path),
            line=next((n for n, line in enumerate(lines, 1) if line.split()[:1] == [host.name]), 0),
        )
        for host in imported.hosts
    )


def _count(text: LaunchText, name: str) -> int | None:
    setting = text.last(f"experiment.runner.{name}")
    if setting is None or setting.values[:1] in ((), ("null",)):
        return None
    return rank_count(setting)


def tree_settings(document: Document, prefix: str = "") -> Iterator[Setting]:
    """Every key of a document that holds no keys itself, as a setting with a dotted name."""
    for path, values in tree_leaves(document.root):
        name = ".".join([*([prefix] if prefix else []), *map(str, path)])
        yield Setting(name=name, values=values, file=document.file, line=document.line(path))


# ---- what it asks for


def flagscale_facts(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; an InputError where meshes are none, or do not make up the launch's ranks."""
    facts = _facts(text, num_layers)
    # No job of FlagScale asks for it; that the launch does stands in its plan (`facts.overlap`).
    return replace(facts, options=replace(facts.options, tp_comm_overlap=None))


def _facts(text: LaunchText, num_layers: int | None) -> LaunchFacts:
    if not is_set(text, "enable-hetero"):
        return megatron_facts(text, num_layers)
    meshes = _meshes(text)
    pp = sum(mesh.pp for mesh in meshes)
    given_layers = number_of(text, None, "num-layers")
    layers = _layers(text, pp, num_layers if given_layers is None else given_layers)
    world = sum(mesh.ranks for mesh in meshes)
    if text.hosts or text.nodes is not None:
        _check_world(text, world)
    return common_facts(
        text,
        world=world,
        meshes=meshes,
        layers=layers,
        num_layers=given_layers,
        stage_recompute=_recompute(text, pp),
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
    names = _device_types(types) if types is not None else []
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


def _device_types(setting: Setting) -> list[str]:
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


def _recompute(text: LaunchText, pp: int) -> tuple[Recompute, ...]:
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
