"""Whether a job can be planned: its pins agree with each other, the target, model and cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from hetplan.cluster.catalogue import load_catalogue, nearest_kinds
from hetplan.cluster.hosts import find_node, node_name
from hetplan.cluster.libraries import island_library
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path, field_text
from hetplan.files.reading import Document
from hetplan.job.kernels import CONTEXT_PARALLEL, FUSED_ATTENTION, kernel_fault, used_kinds
from hetplan.job.spec import SPLIT_WEIGHTS, Job, Objective, RecomputeModule, Variation
from hetplan.job.trainer import mixes_libraries, trainer_faults, trainer_settings
from hetplan.model.layer_units import own_layer_fault, planning_faults
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_target import copied_heads_fault
from hetplan.plans.local_steps import setting_faults
from hetplan.plans.plan import SPLIT_SCHEDULES, Sharding
from hetplan.plans.rules import some
from hetplan.plans.targets import TARGETS, Target
from hetplan.plans.v_schedules import is_v
from hetplan.units import counted

SEARCHED_SPLIT = ("zb-h1", "zbv", "dualpipev")
"""Schedules with split backward passes that are searched, where they are pinned: zb-h1 with one
chunk per stage. v-half and v-min, which no trainer of the targets has, are only priced."""
SEARCHED = ("1f1b", "interleaved-1f1b", *SEARCHED_SPLIT)

MIN_INTERLEAVED_STAGES = 3
"""Fewest that are searched: Megatron-LM interleaves no fewer unless sends are overlapped."""

MAX_SEARCHED_ISLANDS = 60
"""Sets of islands are bits of one number of 64; a few tell which regions were left."""

_ABILITIES = (
    ("cp", 1, "context_parallel", "context parallelism"),
    ("ep", 1, "expert_parallel", "expert parallelism"),
    ("sequence_parallel", 0, "sequence_parallel", "sequence parallelism"),
    ("virtual_stages", 1, "interleaving", "interleaved stages"),
    ("pipelines", 1, "several_pipelines", "several pipelines"),
    ("depth", 0, "other_warmup", "warm-up depths of its own"),
    ("optimizer_offload", 0, "optimizer_offload", "optimizer in host memory"),
)
"""Field of the pin, the value above which it needs something, that field of Target, its name."""


def pin_faults(job: Job, model: ModelSpec, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    """(path in the job's file, message) of every contradiction."""
    can = TARGETS.get(job.target)
    if can is None:
        return
    yield from _of_target(job, can)
    yield from _of_schedule(job, model, can)
    yield from _of_heads(job, model, can)
    yield from _of_sequence(job)
    yield from _of_experts(job, model, can)
    yield from _of_stages(job, model, can)
    yield from _of_pipelines(job, cluster)
    yield from _of_libraries(job, cluster)
    yield from _of_modules(job, model, can)
    yield from _of_sharding(job, can)
    yield from _of_offload(job, cluster, can)
    yield from _prices(job, cluster)


def _of_target(job: Job, can: Target) -> Iterator[tuple[Path, str]]:
    pin = job.pin
    for name, least, ability, what in _ABILITIES:
        value = getattr(pin, name)
        if (value or 0) > least and not getattr(can, ability):
            others = [name for name, other in TARGETS.items() if getattr(other, ability)]
            yield (
                ("pin", name),
                f"{str(value).lower()}, and target {job.target} has no {what}; remove it, or plan "
                f"for {' or '.join(others)}",
            )
    if pin.sharded_optimizer is False and can.context_shards and (pin.cp or 1) > 1:
        yield (
            ("pin", "sharded_optimizer"),
            f"false with cp {pin.cp}; target {job.target} shards over context-parallel ranks",
        )


def _of_schedule(job: Job, model: ModelSpec, can: Target) -> Iterator[tuple[Path, str]]:
    pin, name = job.pin, job.pin.schedule
    if name is None:
        return
    field = ("pin", "schedule")
    known = ", ".join(each for each in SEARCHED if each in can.schedules)
    if name not in SEARCHED or name not in can.schedules:
        have = [
            each.name for each in TARGETS.values() if name in SEARCHED and name in each.schedules
        ]
        others = f", or plan for {' or '.join(have)}" if have else ""
        yield field, f"{name!a}; a search for target {job.target} has {known}: use one{others}"
        return
    chunks = {"interleaved-1f1b": pin.virtual_stages or 2}.get(name, 2 if is_v(name) else 1)
    if pin.virtual_stages not in (None, chunks) or (name == "interleaved-1f1b" and chunks == 1):
        yield field, f"{name} with virtual_stages {pin.virtual_stages}; remove one of them"
    if name == "interleaved-1f1b" and (pin.pp or MIN_INTERLEAVED_STAGES) < MIN_INTERLEAVED_STAGES:
        yield (
            field,
            f"{name} with pp {pin.pp}; it is searched from {MIN_INTERLEAVED_STAGES} stages on",
        )
    if (pin.depth or pin.pp == 1 or (pin.pipelines or 1) > 1) and name != "1f1b":
        yield field, f"{name} goes with one pipeline of two stages or more, without pin.depth"
    pp, count = pin.pp or 1, _num_microbatches(job)
    most = model.num_layers // chunks
    if name in SEARCHED_SPLIT and pp > most:
        message = f"{pp} with {name}; {model.name} has {model.num_layers} transformer layers for"
        yield ("pin", "pp"), f"{message} {chunks} or more in each stage: at most {most}"
    if name == "dualpipev" and count and count < 2 * pp:
        message = f"{pp} with dualpipev, and the other pins leave {count} microbatches"
        yield ("pin", "pp"), f"{message}; it needs two per stage: use zbv, or fewer stages"
    fused = not any(trainer_faults(job)) and trainer_settings(job).fused_elementwise
    if name in SPLIT_SCHEDULES and fused and not can.splits_compiled_layers:
        message = f"{name} with trainer.fused_elementwise; target {job.target} cannot split the"
        yield field, f"{message} backward pass of compiled layers: leave one of them out"


def _of_heads(job: Job, model: ModelSpec, can: Target) -> Iterator[tuple[Path, str]]:
    fault = "" if can.copied_heads else copied_heads_fault(model, job.pin.tp or 1)
    if fault:
        yield ("pin", "tp"), f"{fault} of {model.name}, which target {job.target} does not copy"


def _of_sequence(job: Job) -> Iterator[tuple[Path, str]]:
    pin, length = job.pin, job.sequence_length
    cp = pin.cp or 1
    if cp > 1 and length % (2 * cp):
        yield ("pin", "cp"), f"sequence_length {length} is not a multiple of 2 x cp {cp}"
    elif pin.sequence_parallel and pin.tp == 1:
        yield ("pin", "sequence_parallel"), "true with tp 1: there is nothing to be parallel with"
    elif pin.sequence_parallel and pin.tp and length // cp % pin.tp:
        yield (
            ("pin", "sequence_parallel"),
            f"true, and tp {pin.tp} does not divide the {length // cp} tokens of a rank",
        )


def _of_experts(job: Job, model: ModelSpec, can: Target) -> Iterator[tuple[Path, str]]:
    pin = job.pin
    experts = [run.layer.mlp for run in model.layer_runs if isinstance(run.layer.mlp, Experts)]
    ep = pin.ep or 1
    if ep > 1 and not experts:
        yield ("pin", "ep"), f"{ep}, and {model.name} has no experts; remove it"
        return
    for count in dict.fromkeys(each.num_experts for each in experts):
        if count % ep:
            yield ("pin", "ep"), f"{ep} does not divide the {count} experts of {model.name}"
    if ep > 1 and None not in (pin.tp, pin.dp, pin.cp):
        ranks, names = (pin.dp or 1) * (pin.cp or 1), f"cp {pin.cp} x dp {pin.dp}"
        if can.sequence_parallel:
            ranks, names = ranks * (pin.tp or 1), f"tp {pin.tp} x {names}"
        if ranks % ep:
            yield ("pin", "ep"), f"{ep} does not divide {names} = {ranks} ranks"
    needs = can.experts_need_sequence_parallel and experts and (pin.tp or 1) > 1
    if needs and pin.sequence_parallel is False:
        yield (
            ("pin", "sequence_parallel"),
            f"false; target {job.target} trains experts with tp {pin.tp} only with it",
        )


def _of_stages(job: Job, model: ModelSpec, can: Target) -> Iterator[tuple[Path, str]]:
    pin, count = job.pin, _num_microbatches(job)
    virtual, pp = pin.virtual_stages or 1, pin.pp
    if pp and count and pp > count and not can.fewer_microbatches_than_stages:
        yield (
            ("pin", "pp"),
            f"{pp} stages, and the other pins leave {count} microbatches; target {job.target} "
            "needs at least one per stage",
        )
    if pp and pp > 1 and model.tied_embeddings and not can.tied_stages:
        yield (
            ("pin", "pp"),
            f"{pp} stages of {model.name}, which ties embedding and head; target {job.target} "
            "trains it in one stage only",
        )
    if virtual == 1 or pin.schedule in SEARCHED_SPLIT:
        return
    if pin.depth:
        yield ("pin", "depth"), f"{pin.depth} with {virtual} virtual stages; it goes with 1f1b"
    least = pp or MIN_INTERLEAVED_STAGES
    if least < MIN_INTERLEAVED_STAGES:
        yield (
            ("pin", "virtual_stages"),
            f"{virtual} with pp {pp}; interleaving is searched from {MIN_INTERLEAVED_STAGES} "
            "stages on",
        )
    elif least * virtual > model.num_layers:
        yield (
            ("pin", "virtual_stages"),
            f"{virtual} on {'' if pp else 'at least '}{least} stages are {least * virtual} parts, "
            f"{model.name} has {model.num_layers} transformer layers",
        )
    elif pp and count and count % pp:
        yield (
            ("pin", "virtual_stages"),
            f"{virtual} with pp {pp} and {count} microbatches; interleaving needs a multiple of "
            "the stages",
        )


def _num_microbatches(job: Job) -> int | None:
    """Of a pipeline whose pins decide it."""
    pin = job.pin
    if pin.dp is None or pin.microbatch_size is None or (pin.pipelines or 1) > 1:
        return None
    count, rest = divmod(job.global_batch_size, pin.dp * pin.microbatch_size)
    return None if rest else count


def _of_pipelines(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    pin = job.pin
    count = pin.pipelines or 1
    if count == 1:
        return
    if count > job.global_batch_size:
        yield (
            ("pin", "pipelines"),
            f"{count} for {job.global_batch_size} sequences; each needs at least one",
        )
    usable = sum(island.num_usable_devices for island in cluster.islands)
    if count > usable:
        yield ("pin", "pipelines"), f"{count}; {cluster.name} has {usable} usable devices"
    if (pin.virtual_stages or 1) > 1:
        yield (
            ("pin", "virtual_stages"),
            f"{pin.virtual_stages} with {count} pipelines; several pipelines run 1f1b",
        )


def _of_libraries(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    """First and last stage on devices that one run of the trainer cannot have."""
    if mixes_libraries(job):
        return
    ends = (job.pin.embedding_on, job.pin.head_on)
    first, last = (
        {
            island_library(island)
            for island in cluster.islands
            if end is None or end in (island.name, island.device.kind)
        }
        for end in ends
    )
    if None not in ends and first and last and not first & last:
        yield (
            ("pin", "head_on"),
            f"{ends[1]}, and embedding_on {ends[0]}: they go through {', '.join((*first, *last))}, "
            f"and a run of {job.target} has one library of collectives; change one of them, plan "
            "for flagscale or native, or set trainer.mixed_libraries: true if yours is patched",
        )


def _of_modules(job: Job, model: ModelSpec, can: Target) -> Iterator[tuple[Path, str]]:
    pin, path = job.pin, ("pin", "recompute_modules")
    if pin.recompute_modules is None:
        return
    names, known = ", ".join(pin.recompute_modules), ", ".join(can.recompute_modules) or "none"
    mlps = {type(run.layer.mlp) for run in model.layer_runs}
    if not {*pin.recompute_modules} <= {*can.recompute_modules}:
        yield path, f"{names}; target {job.target} can recompute {known} alone"
    elif pin.recompute is not None:
        yield path, f"{names} with recompute {str(pin.recompute).lower()}; leave one of them out"
    elif RecomputeModule.EXPERTS in pin.recompute_modules and Experts not in mlps:
        yield path, f"{names}; {model.name} has no experts: leave moe out"
    elif len({*pin.recompute_modules}) < len(pin.recompute_modules):
        yield path, f"{names}; one is named twice"


def _of_sharding(job: Job, can: Target) -> Iterator[tuple[Path, str]]:
    pin, path = job.pin, ("pin", "sharding")
    if pin.sharding is None:
        return
    if pin.sharding not in can.shardings(job.optimizer):
        known = ", ".join(can.shardings(job.optimizer))
        yield path, f"{pin.sharding}; target {job.target} with {job.optimizer} has {known}: pin one"
    elif pin.sharded_optimizer not in (None, pin.sharding is not Sharding.NONE):
        yield path, f"{pin.sharding} with sharded_optimizer {str(pin.sharded_optimizer).lower()}"
    elif pin.sharding is Sharding.NONE and can.context_shards and (pin.cp or 1) > 1:
        yield path, f"none with cp {pin.cp}; target {job.target} shards over context-parallel ranks"
    elif pin.sharding in SPLIT_WEIGHTS:
        for name in ("pp", "pipelines", "virtual_stages"):
            if (getattr(pin, name) or 1) > 1:
                message = f"{pin.sharding} with {name} {getattr(pin, name)}; it is searched in one "
                yield path, message + "stage, as pipelines keep gradients and parameters whole"


def _of_offload(job: Job, cluster: Cluster, can: Target) -> Iterator[tuple[Path, str]]:
    part, path = job.pin.optimizer_offload, ("pin", "optimizer_offload")
    if not part or not can.optimizer_offload:
        return
    if Sharding.OPTIMIZER not in can.shardings(job.optimizer):
        yield (
            path,
            f"{part:g} with {job.optimizer}; target {job.target} offloads adamw alone",
        )
    elif (job.pin.pipelines or 1) > 1:
        yield path, f"{part:g} with {job.pin.pipelines} pipelines; it is searched for one"
    used = [island for island in cluster.islands if island.name not in job.forbid.islands]
    if not any(island.host_memory_bytes for island in used):
        yield (
            path,
            f"{part:g}, and no island of {cluster.name} says what its hosts can keep; add "
            'host_memory (of one node, as in "host_memory: 256 GiB"), or remove the pin',
        )
    elif not any(island.can_offload for island in used):
        kinds = some(list(dict.fromkeys(island.device.kind for island in used)), 3)
        yield path, f"{part:g}; how {kinds} reach their hosts is not known; add host to the kind"


def _prices(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    """An aim in dollars or kWh needs the figures of every island that may be used."""
    used = [island for island in cluster.islands if island.name not in job.forbid.islands]
    if job.objective is Objective.COST_PER_TOKEN:
        lacks = "no price; give them one (price)"
        paid = {
            region
            for site in cluster.sites
            for region in site.regions
            if site.price_usd_per_joule is not None
        }
        without = [
            each.name
            for each in used
            if each.price_usd_per_device_hour is None and each.region not in paid
        ]
    elif job.objective is Objective.ENERGY_PER_TOKEN:
        lacks = "no known power; give it (power), or max_power of their kind"
        without = [
            each.name
            for each in used
            if each.power_watts is None and not each.device.max_power_watts
        ]
    else:
        return
    if without:
        yield (
            ("objective",),
            f"{job.objective}, and islands {some(without, 3)} of {cluster.name} have {lacks}, or "
            "forbid them",
        )


def _of_run(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    """How long the run is, where its days count; kinds whose failures are given exist."""
    if job.objective is Objective.DAYS and job.total_tokens is None:
        message = (
            "days, and the job has no total_tokens; say how long it is, as in total_tokens: 2T"
        )
        yield ("objective",), message
    if not job.run.kind_failures:
        return
    known = {island.device.kind for island in cluster.islands}
    known |= {device.kind for device in load_catalogue()}
    for at, each in enumerate(job.run.kind_failures):
        if each.kind not in known:
            near = (
                ", ".join(nearest_kinds(each.kind, known)[:3]) or "none; see hetplan doctor --kinds"
            )
            message = f"{each.kind} is no device kind; nearest: {near}"
            yield ("run", "kind_failures", at, "kind"), message


MIN_SAMPLES = 10
"""Of one variation: fewer have no worst tenth."""


def variation_faults(
    vary: Sequence[Variation], cluster: Cluster
) -> Iterator[tuple[tuple[str, int], str]]:
    """(path in the job's file, message) of what does not vary so on this cluster."""
    kinds = {island.name: island.device.kind for island in cluster.islands}
    ends, seen = (cluster.regions, tuple(kinds)), set[frozenset[str]]()
    for at, each in enumerate(vary):
        of, message = frozenset(each.of), ""
        if of in seen:
            message = "is there twice"
        elif (each.spread is None) == (not each.samples):
            message = "give either a spread, as in 0.3, or samples"
        elif 0 < len(each.samples) < MIN_SAMPLES:
            message = f"{counted(len(each.samples), 'sample')}; give {MIN_SAMPLES}"
        elif len(each.of) == 1 and not of & {*kinds, *kinds.values()}:
            message = f"name a kind or island of: {some(dict.fromkeys((*kinds.values(), *kinds)))}"
        elif len(each.of) != 1 and (len(of) != 2 or not any(of <= {*e} for e in ends)):
            message = f"name two regions or two islands of: {some((*ends[0], *ends[1]))}"
        seen.add(of)
        if message:
            yield ("vary", at), f"{' '.join(each.of)[:80]}: {message}"


def _of_synchronisation(job: Job, model: ModelSpec, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    """Local steps are between regions, of a target that has them."""
    wanted = job.synchronisation
    if wanted is None:
        return
    regions = dict.fromkeys(
        each.region for each in cluster.islands if each.name not in job.forbid.islands
    )
    can = TARGETS.get(job.target)
    if len(regions) < 2:
        message = f"{cluster.name} has one region, {some(regions)}; local steps are between regions"
        yield ("synchronisation",), f"{message}: leave it out"
    if can is not None and not can.local_steps:
        have = " or ".join(name for name, other in TARGETS.items() if other.local_steps)
        message = f"target {job.target} has no local steps here; leave it out, or plan for {have}"
        yield ("synchronisation",), message
    for name, message in setting_faults(wanted, model.num_layers):
        yield ("synchronisation", name), message


def check_job_against(
    job: Job,
    model: ModelSpec,
    cluster: Cluster,
    document: Document | None = None,
    *,
    searched: bool = True,
) -> tuple[Fault, ...]:
    """Every fault; with the job's `document`, each names its file and line.

    Not searched: models that can be priced but not searched are no fault.
    """

    def fault(path: Path, message: str) -> Fault:
        if document is not None:
            return document.fault(path, message)
        return Fault(field=field_text(path), message=message)

    found = (
        *(_own_layers(job, model) if searched else ()),
        *_lengths(job, model),
        *_experts(job, model),
        *_degrees(job, model, cluster),
        *_names(job, cluster),
        *((("trainer", name), message) for name, message in trainer_faults(job)),
        *_product_format(job, cluster),
        *_kernels(job, cluster),
        *_of_run(job, cluster),
        *variation_faults(job.vary, cluster),
        *_of_synchronisation(job, model, cluster),
        *((*_unsearched(job), *_islands(job, cluster)) if searched else ()),
        *(pin_faults(job, model, cluster) if searched else ()),
    )
    # What is wrong with the model stands in no line of the job's file.
    of_model = (
        Fault(field="model", message=message)
        for message in (planning_faults(model, job.sequence_length) if searched else ())
    )
    return (*of_model, *(fault(path, message) for path, message in found))


def _islands(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    nodes = {*job.forbid.nodes}
    left = [
        each
        for each in cluster.islands
        if each.name not in job.forbid.islands
        and any(
            nodes.isdisjoint((f"{each.name}/{node}", node_name(each, node)))
            for node in each.usable_nodes
        )
    ]
    if len(left) > MAX_SEARCHED_ISLANDS:
        yield (
            ("forbid", "islands"),
            f"leave {len(left)} islands of {cluster.name}; at most {MAX_SEARCHED_ISLANDS} are "
            "searched: forbid some, or write islands of one kind in one region as one",
        )


def _lengths(job: Job, model: ModelSpec) -> Iterator[tuple[Path, str]]:
    if job.sequence_length > model.max_sequence_length:
        yield (
            ("sequence_length",),
            f"{job.sequence_length} is longer than max_sequence_length "
            f"{model.max_sequence_length} of {model.name}; shorten it or change the model",
        )


def _experts(job: Job, model: ModelSpec) -> Iterator[tuple[Path, str]]:
    if job.expert_load_factor > 1 and not any(
        isinstance(run.layer.mlp, Experts) for run in model.layer_runs
    ):
        yield (
            ("expert_load_factor",),
            f"{job.expert_load_factor:g}, and {model.name} has no experts; remove it",
        )


def _product_format(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    wanted = job.trainer.product_format
    used = [island for island in cluster.islands if island.name not in job.forbid.islands]
    for kind in dict.fromkeys(island.device for island in used):
        if wanted is not None and wanted.rate not in kind.dtypes:
            have = ", ".join(kind.dtypes) or "none"
            yield (
                ("trainer", "product_format"),
                f"{wanted} needs a {wanted.rate} rate, and {kind.kind} has none (rates it has: "
                f"{have}); leave it out or forbid its islands",
            )


def _kernels(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    narrow = job.trainer.product_format
    for kind in used_kinds(cluster, job):
        for field, feature in (
            (("precision",), job.precision.value),
            (
                ("trainer", "product_format"),
                narrow.value if narrow and narrow.rate in kind.dtypes else "",
            ),
            (("pin", "cp"), CONTEXT_PARALLEL if (job.pin.cp or 1) > 1 else ""),
            (
                ("trainer", "fused_attention"),
                FUSED_ATTENTION if job.trainer.fused_attention else "",
            ),
        ):
            fault = kernel_fault(kind, feature, job.target)
            if fault:
                yield field, f"{fault}; change it, or forbid the islands of {kind.kind}"


def _own_layers(job: Job, model: ModelSpec) -> Iterator[tuple[Path, str]]:
    """Why hetplan's own trainer cannot build the model."""
    can = TARGETS.get(job.target)
    fault = own_layer_fault(model, trained=True) if can is not None and can.own_layers_only else ""
    if fault:
        yield ("target",), f"{job.target} cannot train the model: {fault}"


def _unsearched(job: Job) -> Iterator[tuple[Path, str]]:
    if job.trainer.blocking_sends:
        yield (
            ("trainer", "blocking_sends"),
            "can be priced (hetplan estimate), not searched; leave it out",
        )


def _degrees(job: Job, model: ModelSpec, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    tp, pp, dp = job.pin.tp, job.pin.pp, job.pin.dp
    if tp is not None:
        for fault in model.slicing_faults(tp):
            yield ("pin", "tp"), fault
        per_node = sorted({island.devices_per_node for island in cluster.islands})
        if not any(count % tp == 0 for count in per_node):
            counts = ", ".join(map(str, per_node))
            yield ("pin", "tp"), f"{tp} divides no node; nodes have {counts} devices"
    if pp is not None and pp > model.num_layers:
        yield (
            ("pin", "pp"),
            f"{pp} stages for {model.num_layers} transformer layers of {model.name}; "
            "each stage needs at least one",
        )
    # Every pipeline has devices of its own.
    needed = (tp or 1) * (pp or 1) * (dp or 1) * (job.pin.cp or 1) * (job.pin.pipelines or 1)
    usable = sum(island.num_usable_devices for island in cluster.islands)
    if not usable:
        yield (), f"{cluster.name} has no usable device: nodes_out names every node"
    elif needed > usable:
        yield (
            ("pin",),
            f"the pinned degrees need at least {needed} devices, {cluster.name} has {usable} "
            "usable",
        )


def _names(job: Job, cluster: Cluster) -> Iterator[tuple[Path, str]]:
    islands = {island.name: island for island in cluster.islands}
    places = set(islands) | {island.device.kind for island in cluster.islands}
    for key, name in (("embedding_on", job.pin.embedding_on), ("head_on", job.pin.head_on)):
        if name is not None and name not in places:
            yield ("pin", key), _unknown(name, places, "island or device kind", cluster)
        elif name in job.forbid.islands:
            yield ("pin", key), f"island {name} is forbidden; remove one of the two"
    for at, name in enumerate(job.forbid.islands):
        if name not in islands:
            yield ("forbid", "islands", at), _unknown(name, set(islands), "island", cluster)
    if islands and set(islands) <= set(job.forbid.islands):
        yield ("forbid", "islands"), f"every island of {cluster.name} is forbidden"
    for at, node in enumerate(job.forbid.nodes):
        try:
            find_node(cluster, node)
        except InputError as error:
            yield ("forbid", "nodes", at), str(error)


def _unknown(name: str, known: set[str], what: str, cluster: Cluster) -> str:
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.4) or sorted(known)
    return f"{cluster.name} has no {what} named {name}; it has {', '.join(near)}"
