"""Rules about stages: their devices, their layers, and the groups that talk to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hetplan.cluster.spec import Transport
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.plans.formats import reduction_formats
from hetplan.plans.pieces import (
    Devices,
    Holders,
    device_array,
    expert_copies,
    holders,
    stage_array,
    stage_copies,
)
from hetplan.plans.plan import (
    RecomputeGranularity,
    RecomputeModule,
    ReductionGroup,
    Sharding,
    Stage,
)
from hetplan.plans.rules import CheckedPlan, Found, experts_of, some
from hetplan.plans.v_schedules import places


def devices_exist(checked: CheckedPlan) -> Found:
    """No range of devices leaves the cluster, and no list of them is longer than it."""
    total = checked.cluster.num_devices
    lists = [(f"{field}.devices", replica.devices) for field, replica in checked.replicas()]
    lists += [
        (f"reduction_groups[{g}].members", group.members)
        for g, group in enumerate(checked.plan.every_group)
    ]
    lists += [
        ("tied_embedding_devices", checked.plan.tied_embedding_devices),
        ("unused_devices", checked.plan.unused_devices),
    ]
    for field, parts in lists:
        beyond = [part.last for part in parts if part.last >= total]
        count = sum(part.count for part in parts)
        if beyond:
            yield field, f"devices {some(beyond)} do not exist; the cluster has {total}"
        elif count > total:
            yield field, f"lists {count} devices; the cluster has {total}"


def devices_once(checked: CheckedPlan) -> Found:
    """No device is in two stages, or twice in one."""
    owner = np.full(checked.cluster.num_devices, -1, dtype=np.int64)
    names: list[str] = []
    for at, (field, _, stage) in enumerate(checked.stages()):
        names.append(field)
        devices = stage_array(stage)
        taken = devices[owner[devices] >= 0]
        if taken.size:
            yield field, f"device {taken[0]} is already used by {names[owner[taken[0]]]}"
        elif np.unique(devices).size < devices.size:
            yield field, "lists a device twice"
        owner[devices] = at


def devices_counted(checked: CheckedPlan) -> Found:
    """Every device is in a stage or listed as unused, once."""
    used = np.zeros(checked.cluster.num_devices, dtype=np.bool_)
    for _, _, stage in checked.stages():
        used[stage_array(stage)] = True
    unused = device_array(checked.plan.unused_devices)
    both = unused[used[unused]]
    used[unused] = True
    missing = np.flatnonzero(~used)
    if both.size:
        yield "unused_devices", f"device {both[0]} is used by a stage"
    elif missing.size:
        yield "unused_devices", f"devices {some(missing)} are neither used nor listed"
    elif np.unique(unused).size < unused.size:
        yield "unused_devices", "lists a device twice"


def degrees(checked: CheckedPlan) -> Found:
    """Degrees are at least 1, and tp x cp divides a replica's devices."""
    for field, _, stage in checked.stages():
        if not stage.replicas:
            yield f"{field}.replicas", "a stage needs at least one replica"
    for field, replica in checked.replicas():
        tp, cp, ep, etp = replica.tp, replica.cp, replica.ep, replica.etp
        count, size = replica.num_devices, replica.microbatch_size
        if min(tp, cp, ep, etp, size) < 1:
            degrees = f"tp {tp}, cp {cp}, ep {ep}, etp {etp} and microbatch_size {size}"
            yield field, f"{degrees} must all be at least 1"
        elif count == 0 or count % (tp * cp):
            yield field, f"{count} devices are not a multiple of tp {tp} x cp {cp}"


def expert_degrees(checked: CheckedPlan) -> Found:
    """Experts are dealt out over all devices of a replica."""
    for field, replica in checked.replicas():
        ep, etp, count = replica.ep, replica.etp, replica.num_devices
        if count % (ep * etp):
            yield field, f"ep {ep} x etp {etp} does not divide its {count} devices"


def nodes_usable(checked: CheckedPlan) -> Found:
    """No stage has a device of a node that is out."""
    for field, _, stage in checked.stages():
        out = checked.places.out(stage_array(stage))
        if out.size:
            yield field, f"devices {some(out)} are in nodes that are out"


def one_island(checked: CheckedPlan) -> Found:
    """A replica entry lies on one island."""
    for field, replica in checked.replicas():
        islands = np.unique(checked.places.islands(device_array(replica.devices)))
        if islands.size > 1:
            names = ", ".join(checked.cluster.islands[at].name for at in islands)
            yield field, f"mixes islands {names}; give the devices of each an entry of their own"


def tp_in_node(checked: CheckedPlan) -> Found:
    """A tensor-parallel group lies in one node."""
    for field, replica in checked.replicas():
        groups = device_array(replica.devices).reshape(-1, replica.tp)
        nodes = checked.places.nodes(groups.ravel()).reshape(groups.shape)
        spread = np.flatnonzero((nodes != nodes[:, :1]).any(axis=1))
        if spread.size:
            first = int(spread[0])
            count = np.unique(nodes[first]).size
            yield field, f"tensor-parallel group {some(groups[first])} spans {count} nodes"


def slices(checked: CheckedPlan) -> Found:
    """Tp divides what it cuts of a layer, ep the experts and etp what it cuts of an expert."""
    for stage_field, _, stage in checked.stages():
        for r, replica in enumerate(stage.replicas):
            field = f"{stage_field}.replicas[{r}]"
            ep, etp = replica.ep, replica.etp
            yield from ((field, fault) for fault in checked.model.slicing_faults(replica.tp))
            if not checked.experts and (ep, etp) != (1, 1):
                name = checked.model.name
                yield field, f"ep {ep} and etp {etp}, but {name} has no experts: use 1"
            for experts in checked.experts_in(stage):
                count, width = experts.num_experts, experts.expert_ffn_hidden_size
                if count % ep:
                    yield f"{field}.ep", f"ep {ep} does not divide {count} experts"
                if width % etp:
                    message = f"etp {etp} does not divide expert_ffn_hidden_size {width}"
                    yield f"{field}.etp", message


def layers_exist(checked: CheckedPlan) -> Found:
    """There is a stage, and every chunk is a range of the model's layers."""
    total = len(checked.model.layers)
    if not checked.plan.pipelines:
        yield "pipelines", "a plan needs at least one pipeline"
    for p, pipeline in enumerate(checked.plan.pipelines):
        if not pipeline.stages:
            yield f"pipelines[{p}].stages", "a pipeline needs at least one stage"
    for field, _, stage in checked.stages():
        for c, chunk in enumerate(stage.chunks):
            if not 0 <= chunk.start < chunk.stop <= total:
                message = (
                    f"layers {chunk.start} to {chunk.stop} are not in 0 to {total} of "
                    f"{checked.model.name}, or the range is empty"
                )
                yield f"{field}.chunks[{c}]", message


def chunks(checked: CheckedPlan) -> Found:
    """A stage has one layer range per virtual stage."""
    for field, pipeline, stage in checked.stages():
        count, virtual = len(stage.chunks), pipeline.schedule.virtual_stages
        if count != virtual:
            yield f"{field}.chunks", f"{count} layer ranges for {virtual} virtual stages"


def layers_once(checked: CheckedPlan) -> Found:
    """The stages of a pipeline hold every layer once."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        copies = np.zeros(len(checked.model.layers), dtype=np.int64)
        for chunk in (chunk for stage in pipeline.stages for chunk in stage.chunks):
            copies[chunk.start : chunk.stop] += 1
        missing, twice = np.flatnonzero(copies == 0), np.flatnonzero(copies > 1)
        if missing.size:
            yield f"pipelines[{p}]", f"no stage holds layers {some(missing)}"
        if twice.size:
            yield f"pipelines[{p}]", f"more than one stage holds layers {some(twice)}"


def layers_in_order(checked: CheckedPlan) -> Found:
    """A pipeline that holds every layer once has them in the order of its virtual stages."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        ranges = [chunk for stage in pipeline.stages for chunk in stage.chunks]
        ends = sorted((chunk.start, chunk.stop) for chunk in ranges)
        if any(left[1] != right[0] for left, right in pairwise(ends)):
            continue  # `layers_once` says it
        at = 0
        schedule, count = pipeline.schedule, len(pipeline.stages)
        for s, c in places(schedule.name, count, schedule.virtual_stages):
            chunk = pipeline.stages[s].chunks[c]
            if chunk.start != at:
                message = f"starts at layer {chunk.start}; the one before it ends at {at}"
                yield f"pipelines[{p}].stages[{s}].chunks[{c}]", message
            at = chunk.stop


def transformer_layer(checked: CheckedPlan) -> Found:
    """No stage has only the embedding, the head, or both."""
    kinds = checked.model.layers
    plain = {LayerKind.EMBEDDING, LayerKind.HEAD}
    for field, _, stage in checked.stages():
        if all(plain.issuperset(kinds[chunk.start : chunk.stop]) for chunk in stage.chunks):
            yield field, "holds no transformer layer; give it one, or leave the stage out"


def recompute(checked: CheckedPlan) -> Found:
    """Modules are named by selective recomputation only, and layers are there to recompute."""
    for field, _, stage in checked.stages():
        where, asks = f"{field}.recompute", stage.recompute
        selective = asks.granularity is RecomputeGranularity.SELECTIVE
        if selective and not asks.modules:
            yield f"{where}.modules", "selective recomputation needs at least one module"
        elif asks.modules and not selective:
            yield (
                f"{where}.modules",
                f"{', '.join(asks.modules)} with granularity {asks.granularity}; only selective "
                "recomputation names modules",
            )
        elif len(set(asks.modules)) != len(asks.modules):
            yield f"{where}.modules", f"{', '.join(asks.modules)} names a module twice"
        elif RecomputeModule.EXPERTS in asks.modules and not checked.experts:
            yield f"{where}.modules", f"{RecomputeModule.EXPERTS}: the model has no experts"
        if asks.layers is not None:
            yield from _recomputed_layers(checked, where, stage, asks.layers)


def _recomputed_layers(checked: CheckedPlan, where: str, stage: Stage, count: int) -> Found:
    if stage.recompute.granularity is not RecomputeGranularity.FULL:
        yield (
            f"{where}.layers",
            f"{count} with granularity {stage.recompute.granularity}; only full recomputation "
            "counts layers",
        )
        return
    end = len(checked.model.layers) - 1
    # Embedding and head are never recomputed. Like Megatron-LM's block method, a number that is
    # larger than a short chunk means all of it; none may be larger than every chunk.
    most = max(min(chunk.stop, end) - max(chunk.start, 1) for chunk in stage.chunks)
    if not 1 <= count <= most:
        yield (
            f"{where}.layers",
            f"{count}; the stage's longest layer range has {most} transformer layers",
        )


def boundaries(checked: CheckedPlan) -> Found:
    """One boundary between each two neighbours, with the transport of their link."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        field = f"pipelines[{p}].boundaries"
        if len(pipeline.boundaries) != len(pipeline.stages) - 1:
            message = f"{len(pipeline.boundaries)} for {len(pipeline.stages)} stages"
            yield field, message
            continue
        for b, (boundary, (left, right)) in enumerate(
            zip(pipeline.boundaries, pairwise(pipeline.stages), strict=True)
        ):
            where = f"{field}[{b}]"
            if boundary.index != b:
                message = f"{boundary.index}; boundaries stand in order, this is {b}"
                yield f"{where}.index", message
            yield from _format(f"{where}.precision", boundary.precision)
            both = np.concatenate([stage_array(left), stage_array(right)])
            yield from _transport(checked, where, boundary.transport, both)


def _format(field: str, found: str) -> Found:
    if found not in [each.value for each in Precision]:
        yield field, f"{found!a}; it is one of {', '.join(Precision)}"


def _transport(checked: CheckedPlan, where: str, found: str, devices: Devices) -> Found:
    try:
        wanted = checked.places.group_transport(devices)
    except InputError as error:
        yield where, str(error)
        return
    if found not in [each.value for each in Transport]:
        yield f"{where}.transport", f"{found!a}; it is one of {', '.join(Transport)}"
    elif found != wanted.value:
        yield f"{where}.transport", f"{found}; the link between its devices is {wanted}"


def sharding(checked: CheckedPlan) -> Found:
    """Shards divide the copies of every stage, there is something to shard, and gradients that are
    sharded have one format, because a stage reduces them microbatch by microbatch.
    """
    plan = checked.plan
    shards = plan.optimizer_shards
    if shards < 1:
        yield "optimizer_shards", f"{shards}; at least 1"
        return
    if (plan.sharding is Sharding.NONE) != (shards == 1):
        yield (
            "sharding",
            f"{plan.sharding} with optimizer_shards {shards}; none belongs to 1 shard, anything "
            "else to more",
        )
        return
    formats = reduction_formats(plan)
    if plan.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS) and len(formats) > 1:
        yield (
            "reduction_groups",
            f"precision {', '.join(map(ascii, formats))} with sharding {plan.sharding}; sharded "
            "gradients are reduced in one format",
        )
    stages = [stage for _, _, stage in checked.stages()]
    every = math.lcm(*(stage_copies(stage) for stage in stages))
    if shards == every:
        return  # every stage shards over all of its ranks, and so do its experts
    experts = bool(checked.experts)
    for copies, of_expert in sorted({(stage_copies(each), expert_copies(each)) for each in stages}):
        if copies % shards:
            message = (
                f"{shards} does not divide dp x cp {copies}; use a divisor of it, or {every} for "
                "all ranks of every stage"
            )
            yield "optimizer_shards", message
        elif shards > 1 and experts and of_expert % (copies // shards):
            # Experts are sharded inside the same groups: as many copies of their state are kept.
            yield (
                "optimizer_shards",
                f"{shards} shards of {copies} copies keep {copies // shards} copies of the "
                f"optimizer state, which does not divide the {of_expert} copies of an expert",
            )


def tied(checked: CheckedPlan) -> Found:
    """Which devices keep their copies of a tied matrix equal."""
    both = [pipeline.ends for pipeline in checked.plan.pipelines]
    tied = checked.model.tied_embeddings and any(len(ends) > 1 for ends in both)
    ends = [stage_array(stage) for stages in both for stage in stages]
    wanted = np.unique(np.concatenate(ends)) if tied else np.empty(0, dtype=np.int64)
    listed = device_array(checked.plan.tied_embedding_devices)
    if not np.array_equal(np.unique(listed), wanted) or (listed.size > wanted.size):
        yield (
            "tied_embedding_devices",
            "must be the devices of the first and the last stage, each once, whose copies of the "
            "tied matrix would drift apart otherwise"
            if tied
            else "must be empty: no two stages share a tied matrix",
        )
    found, field = checked.plan.tied_embedding_precision, "tied_embedding_precision"
    if found is not None and not tied:
        yield field, f"{found!a}; must be null: no two stages share a tied matrix"
    elif tied:
        yield from _format(field, "null" if found is None else found)


def reductions(checked: CheckedPlan) -> Found:
    """Every copy of every weight meets all the others of its site in exactly one group, and those
    of all sites in one that averages them.
    """
    plan, sites = checked.plan, checked.plan.site_of_pipeline
    for site in sorted({*sites}):
        own = [each for each, place in zip(plan.pipelines, sites, strict=True) if place == site]
        mine = replace(checked, plan=replace(plan, pipelines=tuple(own)))
        others = [each for each in plan.pipelines if each not in own]
        foreign = {
            g
            for g, group in enumerate(plan.reduction_groups if others else ())
            if any(group.has(stage) for each in others for stage in each.stages)
            and not any(group.has(stage) for each in own for stage in each.stages)
        }
        yield from _reduced_once(mine, foreign)
    if plan.outer is not None:
        averaged = replace(plan, reduction_groups=plan.outer.reduction_groups)
        for field, message in _reduced_once(replace(checked, plan=averaged), set()):
            yield f"outer.{field}", message


def _reduced_once(checked: CheckedPlan, foreign: set[int]) -> Found:
    """The same of one site; `foreign`: numbers of the others' groups."""
    total = len(checked.model.layers)
    groups = checked.plan.reduction_groups
    for g, group in enumerate(groups):
        if not 0 <= group.layers.start < group.layers.stop <= total:
            yield (
                f"reduction_groups[{g}].layers",
                f"{group.layers.start} to {group.layers.stop} are not in 0 to {total}, or empty",
            )
            return
        yield from _format(f"reduction_groups[{g}].precision", group.precision)
    cuts = [cut for group in groups for cut in (group.layers.start, group.layers.stop)]
    pieces = [*holders([each.stages for each in checked.plan.pipelines], total, cuts)]
    starts = {piece.layers.start: at for at, piece in enumerate(pieces)}
    covering: list[list[int]] = [[] for _ in pieces]
    for g, group in enumerate(groups):
        if g in foreign:
            continue
        at = starts[group.layers.start]
        while at < len(pieces) and pieces[at].layers.start < group.layers.stop:
            covering[at].append(g)
            at += 1
    told: set[int] = set()
    for piece, found in zip(pieces, covering, strict=True):
        yield from _covered(checked, piece, found, told)
    for g, group in enumerate(groups):
        where = f"reduction_groups[{g}]"
        if group.members and g not in told | foreign:
            members = device_array(group.members)
            yield from _transport(checked, where, group.transport, members)


def _covered(checked: CheckedPlan, piece: Holders, found: Sequence[int], told: set[int]) -> Found:
    """Faults of the groups that cover one piece; groups in `told` were named before."""
    groups = checked.plan.reduction_groups
    layers = f"layers {piece.layers.start} to {piece.layers.stop}"
    experts = bool(experts_of(checked.model, piece.layers.start, piece.layers.stop))
    apart = experts and piece.experts_apart
    members: Devices | None = None
    for expert, copies in ((False, piece.copies), (True, piece.expert_copies if apart else 1)):
        mine = [g for g in found if groups[g].expert is expert]
        what = "routed experts" if expert else "weights"
        if len(mine) != (copies > 1):
            yield (
                f"reduction_groups[{mine[-1]}]" if mine else "reduction_groups",
                f"{len(mine)} groups reduce the {what} of {layers}, which have {copies} "
                f"{'copies' if copies > 1 else 'copy of their own'}: "
                + ("they would drift apart" if not mine else f"there must be {int(copies > 1)}"),
            )
            told.update(mine)
            continue
        for g in mine:
            if g in told:
                continue
            if members is None:
                members = np.concatenate([stage_array(stage) for stage in piece.stages])
            for field, message in _members(groups[g], members, copies, layers):
                told.add(g)
                yield f"reduction_groups[{g}].{field}", message


def _members(
    group: ReductionGroup, wanted: Devices, copies: int, layers: str
) -> Iterator[tuple[str, str]]:
    listed = device_array(group.members)
    if not np.array_equal(listed, wanted):
        missing = np.setdiff1d(wanted, listed)
        foreign = np.setdiff1d(listed, wanted)
        if missing.size:
            yield "members", f"lacks devices {some(missing)}, which hold {layers}"
        elif foreign.size:
            yield "members", f"lists devices {some(foreign)}, which do not hold {layers}"
        else:
            yield "members", f"does not list the devices of {layers} in the order of their stages"
    elif group.degree != copies:
        yield "degree", f"{group.degree}; {layers} have {copies} copies"
