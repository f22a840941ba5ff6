"""What a launch of torchtitan asks for, its defaults filled in.

Versions of 2025 and before were configured by TOML, which `toml_launch` reads; newer ones by their
command line, a script like any other.

Three ways of saying the batch are read, by the names of the settings: sequences (release 0.3.0 and
before: training.local_batch_size, or batch_size in the oldest TOML), and tokens (code after it:
training.num_tokens_per_microbatch_per_dp_rank). Defaults: torchtitan/config/configs.py of 0.3.0 and
b5bcd76; what a Python configuration (`--config NAME`) sets is not in a launch.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, shown
from hetplan.job.spec import ProductFormat, TrainerOptions
from hetplan.plans.plan import OverlapSettings, Recompute, RecomputeGranularity
from hetplan.plans.v_schedules import looped
from hetplan.trainers.launch_values import (
    GIVEN_FILE,
    MAX_STAGES,
    Given,
    LaunchFacts,
    LaunchHost,
    LaunchMesh,
    LaunchText,
    Setting,
    ValueNotGivenError,
    algorithm_remarks,
    count_of,
    fault_of,
    flag,
    fraction_of,
    held_algorithm,
    number_of,
    rank_count,
    tree_leaves,
    word_of,
    world_size,
    wrong,
)

_SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "gpipe": "gpipe",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
"""By torch's names (get_schedule_class), which do not depend on case."""
_LAYER = re.compile(r"layers\.([0-9]{1,6})", re.ASCII)


def toml_launch(
    file: str, text: str, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """A TOML file; `given` or `hosts` say how many ranks start it: nnodes, nproc-per-node."""
    settings = [*_toml_settings(file, text)]
    for at, (name, value) in enumerate(given, start=1):
        settings.append(Setting(name=name, values=(value,), file=GIVEN_FILE, line=at))
    launch = LaunchText(trainer="torchtitan", settings=tuple(settings), hosts=hosts)
    nodes, devices = launch.last("nnodes"), launch.last("nproc-per-node")
    return replace(
        launch,
        nodes=None if nodes is None else rank_count(nodes),
        devices_per_node=None if devices is None else rank_count(devices),
    )


def _toml_settings(file: str, text: str) -> Iterator[Setting]:
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError of int() for too many digits, too
        # The message ends with the place: (at line 3, column 5).
        place = str(error).rpartition("at line ")[2].partition(",")[0]
        line = int(place) if place.isdecimal() and len(place) < 9 else 0
        raise fault_at(file, line, f"is not TOML: {str(error)[:200]}") from error
    lines = _toml_lines(text)
    for path, values in tree_leaves(root):
        name = ".".join(map(str, path))
        yield Setting(name=name, values=values, file=file, line=lines.get(name, 0))


def _toml_lines(text: str) -> dict[str, int]:
    """Line of each dotted name, the first that begins with it; tomllib keeps no lines."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = stripped.strip("[] ").replace('"', "").partition("#")[0].strip("[] ")
        elif "=" in stripped:
            key = stripped.partition("=")[0].strip().strip('"')
            lines.setdefault(f"{table}.{key}".lstrip("."), number)
    return lines


def torchtitan_facts(text: LaunchText, num_layers: int | None = None) -> LaunchFacts:
    """The facts; an InputError where a number is none, or only the configuration knows it."""
    world = world_size(text)
    mesh, shards = _mesh(text, world)
    batch = _batch(text, mesh)
    given_layers = number_of(text, None, "n-layers", "num-layers")
    schedule, refusals = _schedule(text, mesh.pp)
    refusals = (*refusals, *batch.refusals)
    layers = _layers(text, mesh.pp, num_layers if given_layers is None else given_layers, schedule)
    recompute, refused = _recompute(text)
    if schedule == "interleaved-1f1b" and layers and len(layers[0]) == 1:
        schedule = "1f1b"
    mixed = word_of(text, "bfloat16", "mixed-precision-param")
    whole = word_of(text, "float32", "dtype")
    products = flag(text, "float8", "converters")
    return LaunchFacts(
        text=text,
        world_size=world,
        meshes=(replace(mesh, microbatch_size=batch.microbatch_size),),
        layers=layers,
        num_layers=given_layers,
        global_batch_size=batch.global_batch_size,
        num_microbatches=batch.num_microbatches,
        sequence_length=batch.sequence_length,
        vocab_size=number_of(text, None, "vocab-size"),
        # DTensor shards unevenly where tp does not divide the vocabulary.
        vocab_multiple=1,
        sequence_parallel=mesh.tp > 1 and _sequence_parallel(text),
        sharded_optimizer=shards > 1,
        data_outermost=False,
        precision=(mixed if whole == "float32" else whole),
        tied_embeddings=None,
        stage_recompute=(recompute,) * mesh.pp,
        optimizer_instances=max(1, mesh.dp * mesh.cp // shards) if shards > 1 else 1,
        # FSDP2 does both, and nothing turns it off.
        overlap=OverlapSettings(reduction=True, gathering=True),
        schedule=schedule,
        gradient_clipping=fraction_of(text, 1.0, "max-norm") < _NEVER,
        options=TrainerOptions(
            product_format=_products(products),
            fused_elementwise=_compiles(text) or None,
            collective_algorithm=held_algorithm(text),
        ),
        sharded_parameters=shards > 1 and mesh.pp == 1 and _policy(text) != "never",
        refusals=(*refusals, *refused, *_sharding(text, mesh, shards)),
        remarks=_remarks(text),
    )


def _compiles(text: LaunchText) -> bool:
    """Whether layers are compiled; `enable` alone is a switch of several groups."""
    setting = text.last("compile.enable")
    return setting is not None and not setting.is_false


_NEVER = 1e30
"""A norm that no gradient has: clipping by it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    microbatch_size: int
    num_microbatches: int
    global_batch_size: int
    sequence_length: int | None
    refusals: tuple[Fault, ...]


def _mesh(text: LaunchText, world: int) -> tuple[LaunchMesh, int]:
    """Degrees, and the ranks that share what is sharded (distributed/parallel_dims.py)."""
    tp = count_of(text, 1, "tensor-parallel-degree")
    cp = count_of(text, 1, "context-parallel-degree")
    pp = count_of(text, 1, "pipeline-parallel-degree")
    replicate = count_of(text, 1, "data-parallel-replicate-degree")
    setting = flag(text, "data-parallel-shard-degree")
    rest = tp * cp * pp * replicate
    if setting is None or setting.values == ("-1",):
        shard = world // rest
    else:
        shard = count_of(text, 1, "data-parallel-shard-degree")
    if rest * shard != world or pp > MAX_STAGES:
        message = (
            f"replicate {replicate} x shard {shard} x cp {cp} x tp {tp} x pp {pp} is not the "
            f"{world} ranks of the launch, which torchtitan refuses"
        )
        place = setting or flag(text, "tensor-parallel-degree", "pipeline-parallel-degree")
        raise InputError(fault_of(place, text, message))
    ep = count_of(text, 1, "expert-parallel-degree")
    mesh = LaunchMesh(tp=tp, cp=cp, ep=ep, dp=replicate * shard, pp=pp, microbatch_size=1)
    return mesh, shard * cp


def _sequence_parallel(text: LaunchText) -> bool:
    setting = _raw(text, "enable-sequence-parallel")
    return setting is None or setting.values != ("false",)


def _raw(text: LaunchText, leaf: str) -> Setting | None:
    """A setting also where it is false; `no-NAME` alone is false on torchtitan's command line."""
    found = None
    for each in text.settings:
        name = each.name.rpartition(".")[2].replace("_", "-")
        if name == leaf:
            found = each
        elif name == f"no-{leaf}":
            found = Setting(name=each.name, values=("false",), file=each.file, line=each.line)
    return found


def _needed(text: LaunchText, default: int, *names: str) -> int:
    """A number that a Python configuration may have set; InputError where only that knows it."""
    found = number_of(text, None, *names)
    if found is not None:
        return found
    config = flag(text, "config")
    if config is None:
        return default
    name = next(name for name in names).replace("-", "_")
    chosen = " ".join(config.values)
    message = (
        f"training.{name} is set in Python by the configuration {shown(chosen)}, which is not in "
        f"the launch; give --set training.{name}=N"
    )
    raise ValueNotGivenError(fault_of(config, text, message))


def _batch(text: LaunchText, mesh: LaunchMesh) -> _Batch:
    if flag(text, "num-tokens-per-microbatch-per-dp-rank") is not None:
        return _batch_of_tokens(text, mesh)
    sequence = _needed(text, 2048, "seq-len")
    local = _needed(text, 8, "local-batch-size", "batch-size")
    setting = flag(text, "global-batch-size")
    # -1: no accumulation.
    if setting is None or setting.values == ("-1",):
        total = local * mesh.dp
    else:
        total = count_of(text, 1, "global-batch-size")
    steps = max(1, total // (local * mesh.dp))
    size = local
    if mesh.pp > 1:
        size = count_of(text, 1, "pipeline-parallel-microbatch-size")
        old = number_of(text, None, "pipeline-parallel-microbatches")
        size = size if old is None else max(1, local // old)
    return _Batch(
        microbatch_size=size,
        num_microbatches=max(1, local // size) * steps,
        global_batch_size=total,
        sequence_length=sequence,
        refusals=_accumulated(text, mesh.pp, steps),
    )


def _accumulated(text: LaunchText, pp: int, steps: int) -> tuple[Fault, ...]:
    """With stages every step of accumulation fills and drains the pipeline anew (trainer.py)."""
    if steps == 1 or pp == 1:
        return ()
    message = (
        f"{steps} steps of gradient accumulation, each of which fills and drains the pipeline; a "
        "plan has one row of microbatches: raise training.local_batch_size in a copy, or leave "
        "training.global_batch_size out"
    )
    return (fault_of(flag(text, "global-batch-size", "num-tokens-per-train-step"), text, message),)


def _batch_of_tokens(text: LaunchText, mesh: LaunchMesh) -> _Batch:
    sequence = _needed(text, 2048, "max-context-length")
    tokens = count_of(text, 16384, "num-tokens-per-microbatch-per-dp-rank")
    setting = flag(text, "num-tokens-per-microbatch-per-dp-rank")
    if tokens % sequence:
        message = f"{tokens} tokens are no whole number of sequences of {sequence}"
        raise InputError(fault_of(setting, text, message))
    micro = count_of(text, 1, "num-pp-microbatches") if mesh.pp > 1 else 1
    per_step = tokens * micro * mesh.dp
    whole = flag(text, "num-tokens-per-train-step")
    if whole is None or whole.values == ("-1",):
        total = per_step
    else:
        total = count_of(text, 1, "num-tokens-per-train-step")
    steps = max(1, total // per_step)
    return _Batch(
        microbatch_size=tokens // sequence,
        num_microbatches=micro * steps,
        global_batch_size=total // sequence,
        sequence_length=sequence,
        refusals=_accumulated(text, mesh.pp, steps),
    )


def _schedule(text: LaunchText, pp: int) -> tuple[str, tuple[Fault, ...]]:
    setting = flag(text, "pipeline-parallel-schedule")
    csv = flag(text, "pipeline-parallel-schedule-csv")
    if pp == 1:
        return "1f1b", ()
    if csv is not None and csv.values and csv.values[0]:
        return "1f1b", (fault_of(csv, text, "a schedule of its own has no plan; leave it out"),)
    if setting is None or not setting.values:
        return "1f1b", ()
    name = _SCHEDULES.get(setting.values[0].lower())
    if name is None:
        known = "1F1B, Interleaved1F1B, GPipe, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV"
        message = f"{shown(setting.values[0])} has no price here; plans have {known}"
        return "1f1b", (fault_of(setting, text, message),)
    return name, ()


def _layers(
    text: LaunchText, pp: int, num_layers: int | None, schedule: str
) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage: of module_fqns_per_model_part, or as torchtitan cuts by itself."""
    setting = flag(text, "module-fqns-per-model-part")
    if setting is not None and pp > 1:
        return listed_layers(text, setting, pp, schedule)
    if num_layers is None:
        return ()
    if pp == 1:
        return ((num_layers,),)
    per_stage = number_of(text, None, "pipeline-parallel-layers-per-stage")
    before = count_of(text, 1, "pipeline-parallel-first-stage-less-layers", least=0)
    after = count_of(text, 1, "pipeline-parallel-last-stage-less-layers", least=0)
    effective = num_layers + before + after
    if per_stage is not None:
        stages = -(-effective // per_stage)
    else:
        stages = pp * (1 if schedule in ("1f1b", "gpipe") else 2)
    each, more = divmod(effective, stages)
    if stages % pp or stages > effective or max(before, after) > each:
        message = (
            f"{num_layers} layers (and {before} + {after} for the ends) do not make {stages} "
            f"virtual stages on {pp} ranks, which torchtitan refuses"
        )
        place = flag(text, "pipeline-parallel-layers-per-stage", "pipeline-parallel-degree")
        raise InputError(fault_of(place, text, message))
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    return looped(counts, schedule, pp)


def listed_layers(
    text: LaunchText, setting: Setting, pp: int, schedule: str
) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage in lists of modules; an InputError where they skip or repeat one."""
    counts: list[int] = []
    at = 0
    for names in module_parts(setting):
        for name in names:
            layer = _LAYER.fullmatch(name)
            if layer is not None and int(layer.group(1)) != at:
                message = (
                    f"{name} comes where layers.{at} must; torchtitan drops a layer that no list "
                    "names, without a word"
                )
                raise InputError(fault_of(setting, text, message))
            at += layer is not None
        counts.append(sum(_LAYER.fullmatch(name) is not None for name in names))
    if not counts or len(counts) % pp:
        message = f"{len(counts)} lists of modules, which {pp} pipeline ranks do not divide"
        raise InputError(fault_of(setting, text, message))
    return looped(counts, schedule, pp)


def module_parts(setting: Setting) -> tuple[tuple[str, ...], ...]:
    """Modules of each model part: a JSON list, or names with commas between them (the command line
    of release 0.3); an InputError for anything else.
    """
    parts: list[tuple[str, ...]] = []
    for value in setting.values:
        names: object = [name.strip() for name in value.split(",")]
        if value.lstrip().startswith("["):
            try:
                names = json.loads(value)
            except (ValueError, RecursionError):
                names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(wrong(setting, "a list of module names"))
        parts.append(tuple(names))
    return tuple(parts)


def _recompute(text: LaunchText) -> tuple[Recompute, tuple[Fault, ...]]:
    """activation_checkpoint: full, none, or ways that plans do not have."""
    setting = _chosen(text)
    mode = "selective" if setting is None else setting.values[0].lower()
    mode = mode.removesuffix("-ac").removesuffix("ac")
    if mode == "full":
        return Recompute(granularity=RecomputeGranularity.FULL), ()
    if mode == "none":
        return Recompute(), ()
    message = (
        f"activation_checkpoint {mode} keeps chosen operations, which plans do not have; price its "
        "neighbours with --set activation_checkpoint.mode=full and =none"
    )
    return Recompute(), (fault_of(setting, text, message),)


def _chosen(text: LaunchText) -> Setting | None:
    """The last word on what is recomputed: `activation_checkpoint:full`, or a mode of TOML."""
    found = None
    for each in text.settings:
        if each.name in ("activation_checkpoint", "activation_checkpoint.mode") and each.values:
            found = each
    return found


def _products(setting: Setting | None) -> ProductFormat | None:
    found = "" if setting is None else " ".join(setting.values).lower()
    if "mxfp8" in found or "mx" in found.split(","):
        return ProductFormat.MXFP8
    return ProductFormat.FLOAT8 if "float8" in found else None


def _policy(text: LaunchText) -> str:
    """When FSDP2 frees parameters; "default" is "always" without stages and "never" with them."""
    return word_of(text, "default", "fsdp-reshard-after-forward")


def _sharding(text: LaunchText, mesh: LaunchMesh, shards: int) -> tuple[Fault, ...]:
    """With stages parameters that are freed after forward passes are whole in backward passes."""
    if shards == 1 or mesh.pp == 1 or _policy(text) != "always":
        return ()
    message = (
        "fsdp_reshard_after_forward always with stages frees the parameters after forward passes "
        "alone; plans for torchtitan keep them: price it with --set "
        "parallelism.fsdp_reshard_after_forward=never"
    )
    return (fault_of(flag(text, "fsdp-reshard-after-forward"), text, message),)


def _remarks(text: LaunchText) -> tuple[str, ...]:
    remarks = tuple(algorithm_remarks(text))
    config = flag(text, "config")
    if config is None or config.file.endswith(".toml"):
        return remarks
    return (
        *remarks,
        f"what the Python configuration {' '.join(config.values)[:60]} sets is not in the launch; "
        "torchtitan's own defaults count for the rest",
    )
