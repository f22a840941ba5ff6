"""Rules about stages: their devices, their layers, and the groups that talk to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    Pipeline,
    RecomputeGranularity,
    RecomputeModule,
    ReductionGroup,
    Replica,
    Sharding,
    Stage,
)
from hetplan.plans.rules import Asked, Found, Rule, some


def devices_exist(asked: Asked) -> Found:
    """No range of devices leaves the cluster, and no list of them is longer than it."""
    total = asked.cluster.num_devices
    lists = [(f"{field}.devices", replica.devices) for field, replica in asked.replicas()]
    lists += [
        (f"reduction_groups[{g}].members", group.members)
        for g, group in enumerate(asked.plan.reduction_groups)
    ]
    lists += [
        ("tied_embedding_devices", asked.plan.tied_embedding_devices),
        ("unused_devices", asked.plan.unused_devices),
    ]
    for field, parts in lists:
        beyond = [part.last for part in parts if part.last >= total]
        count = sum(part.count for part in parts)
        if beyond:
            message = f"devices {some(beyond)} do not exist; the cluster has {total}"
            yield Rule.DEVICES_EXIST, field, message
        elif count > total:
            yield Rule.DEVICES_EXIST, field, f"lists {count} devices; the cluster has {total}"


def devices_once(asked: Asked) -> Found:
    """No device is in two places, and every device is somewhere."""
    owner = np.full(asked.cluster.num_devices, -1, dtype=np.int64)
    names: list[str] = []
    twice = False
    for at, (field, _, stage) in enumerate(asked.stages()):
        names.append(field)
        devices = stage_array(stage)
        taken = devices[owner[devices] >= 0]
        if taken.size:
            yield (
                Rule.DEVICES_ONCE,
                field,
                f"device {taken[0]} is already used by {names[owner[taken[0]]]}",
            )
            twice = True
        elif np.unique(devices).size < devices.size:
            yield Rule.DEVICES_ONCE, field, "lists a device twice"
            twice = True
        owner[devices] = at
    unused = device_array(asked.plan.unused_devices)
    used = unused[owner[unused] >= 0]
    if twice:
        return
    if used.size:
        message = f"device {used[0]} is used by {names[owner[used[0]]]}"
        yield Rule.DEVICES_COUNTED, "unused_devices", message
        return
    owner[unused] = len(names)
    missing = np.flatnonzero(owner < 0)
    if missing.size or np.unique(unused).size < unused.size:
        yield (
            Rule.DEVICES_COUNTED,
            "unused_devices",
            f"devices {some(missing)} are neither used nor listed"
            if missing.size
            else "lists a device twice",
        )


def degrees(asked: Asked) -> Found:
    """Every replica's degrees are at least 1 and divide its devices."""
    for field, _, stage in asked.stages():
        if not stage.replicas:
            yield Rule.DEGREES, f"{field}.replicas", "a stage needs at least one replica"
    for field, replica in asked.replicas():
        tp, cp, ep, etp = replica.tp, replica.cp, replica.ep, replica.etp
        count = replica.num_devices
        if min(tp, cp, ep, etp, replica.microbatch_size) < 1:
            yield (
                Rule.DEGREES,
                field,
                f"tp {tp}, cp {cp}, ep {ep}, etp {etp} and microbatch_size "
                f"{replica.microbatch_size} must all be at least 1",
            )
        elif count == 0 or count % (tp * cp):
            yield Rule.DEGREES, field, f"{count} devices are not a multiple of tp {tp} x cp {cp}"
        elif count % (ep * etp):
            yield (
                Rule.EXPERT_DEGREES,
                field,
                f"ep {ep} x etp {etp} does not divide its {count} devices",
            )


def nodes(asked: Asked) -> Found:
    """Where the devices of every stage are, and what their degrees cut."""
    for field, _, stage in asked.stages():
        out = asked.places.out(stage_array(stage))
        if out.size:
            yield Rule.NODES_USABLE, field, f"devices {some(out)} are in nodes that are out"
        for r, replica in enumerate(stage.replicas):
            where = f"{field}.replicas[{r}]"
            islands = np.unique(asked.places.islands(device_array(replica.devices)))
            if islands.size > 1:
                named = ", ".join(asked.cluster.islands[at].name for at in islands)
                yield (
                    Rule.ONE_ISLAND,
                    where,
                    f"mixes islands {named}; give the devices of each an entry of their own",
                )
            yield from _slices(asked, where, stage, replica)


def _slices(asked: Asked, where: str, stage: Stage, replica: Replica) -> Found:
    for fault in asked.model.slicing_faults(replica.tp):
        yield Rule.SLICES, where, fault
    devices = device_array(replica.devices)
    at = asked.places.nodes(devices).reshape(-1, replica.tp)
    spread = np.flatnonzero((at != at[:, :1]).any(axis=1))
    if spread.size:
        first = int(spread[0])
        group = devices.reshape(-1, replica.tp)[first]
        count = np.unique(at[first]).size
        yield (
            Rule.TP_IN_NODE,
            where,
            f"tensor-parallel group {some(group)} spans {count} nodes",
        )
    experts = [each for chunk in stage.chunks for each in asked.experts_at(chunk.start, chunk.stop)]
    everywhere = asked.experts_at(0, len(asked.model.layers))
    if not everywhere and (replica.ep, replica.etp) != (1, 1):
        yield (
            Rule.SLICES,
            where,
            f"ep {replica.ep} and etp {replica.etp}, but {asked.model.name} has no experts: use 1",
        )
    for each in dict.fromkeys(experts):
        if each.num_experts % replica.ep:
            message = f"ep {replica.ep} does not divide {each.num_experts} experts"
            yield Rule.SLICES, f"{where}.ep", message
        if each.expert_ffn_hidden_size % replica.etp:
            message = (
                f"etp {replica.etp} does not divide expert_ffn_hidden_size "
                f"{each.expert_ffn_hidden_size}"
            )
            yield Rule.SLICES, f"{where}.etp", message


def layers(asked: Asked) -> Found:
    """Every pipeline holds the whole row, in the order of its virtual stages."""
    for p, pipeline in enumerate(asked.plan.pipelines):
        field = f"pipelines[{p}]"
        if not pipeline.stages:
            yield Rule.LAYERS_ONCE, f"{field}.stages", "a pipeline needs at least one stage"
            continue
        wrong = (*_ranges(asked, field, pipeline),)
        yield from wrong or _row(asked, field, pipeline)


def _ranges(asked: Asked, field: str, pipeline: Pipeline) -> Found:
    total = len(asked.model.layers)
    virtual = pipeline.schedule.virtual_stages
    for s, stage in enumerate(pipeline.stages):
        where = f"{field}.stages[{s}].chunks"
        if len(stage.chunks) != virtual:
            yield (
                Rule.CHUNKS,
                where,
                f"{len(stage.chunks)} layer ranges for {virtual} virtual stages",
            )
        for c, chunk in enumerate(stage.chunks):
            if not 0 <= chunk.start < chunk.stop <= total:
                yield (
                    Rule.LAYERS_ONCE,
                    f"{where}[{c}]",
                    f"layers {chunk.start} to {chunk.stop} are not in 0 to {total} of "
                    f"{asked.model.name}, or the range is empty",
                )


def _row(asked: Asked, field: str, pipeline: Pipeline) -> Found:
    kinds = asked.model.layers
    held = [0] * len(kinds)
    for stage in pipeline.stages:
        for chunk in stage.chunks:
            for layer in range(chunk.start, chunk.stop):
                held[layer] += 1
    missing = [layer for layer, count in enumerate(held) if count == 0]
    twice = [layer for layer, count in enumerate(held) if count > 1]
    if missing:
        yield Rule.LAYERS_ONCE, field, f"no stage holds layers {some(missing)}"
    if twice:
        yield Rule.LAYERS_ONCE, field, f"more than one stage holds layers {some(twice)}"
    if not missing and not twice:
        yield from _order(field, pipeline)
    plain = (LayerKind.EMBEDDING, LayerKind.HEAD)
    for s, stage in enumerate(pipeline.stages):
        mine = (layer for chunk in stage.chunks for layer in range(chunk.start, chunk.stop))
        if all(kinds[layer] in plain for layer in mine):
            yield (
                Rule.TRANSFORMER_LAYER,
                f"{field}.stages[{s}]",
                "holds no transformer layer; give it one, or leave the stage out",
            )


def _order(field: str, pipeline: Pipeline) -> Found:
    at = 0
    for c in range(pipeline.schedule.virtual_stages):
        for s, stage in enumerate(pipeline.stages):
            chunk = stage.chunks[c]
            if chunk.start != at:
                yield (
                    Rule.LAYERS_IN_ORDER,
                    f"{field}.stages[{s}].chunks[{c}]",
                    f"starts at layer {chunk.start}; the one before it ends at {at}",
                )
            at = chunk.stop


def recompute(asked: Asked) -> Found:
    """Modules are named by selective recomputation only, and layers are there to recompute."""
    for field, _, stage in asked.stages():
        rule, where, asks = Rule.RECOMPUTE, f"{field}.recompute", stage.recompute
        selective = asks.granularity is RecomputeGranularity.SELECTIVE
        if selective and not asks.modules:
            yield rule, f"{where}.modules", "selective recomputation needs at least one module"
        elif asks.modules and not selective:
            yield (
                rule,
                f"{where}.modules",
                f"{', '.join(asks.modules)} with granularity {asks.granularity}; only selective "
                "recomputation names modules",
            )
        elif len(set(asks.modules)) != len(asks.modules):
            yield rule, f"{where}.modules", f"{', '.join(asks.modules)} names a module twice"
        elif RecomputeModule.EXPERTS in asks.modules and not any(
            asked.experts_at(chunk.start, chunk.stop) for chunk in stage.chunks
        ):
            yield rule, f"{where}.modules", f"{RecomputeModule.EXPERTS}: the stage has no experts"
        if asks.layers is not None:
            yield from _recomputed_layers(asked, where, stage, asks.layers)


def _recomputed_layers(asked: Asked, where: str, stage: Stage, count: int) -> Found:
    if stage.recompute.granularity is not RecomputeGranularity.FULL:
        yield (
            Rule.RECOMPUTE,
            f"{where}.layers",
            f"{count} with granularity {stage.recompute.granularity}; only full recomputation "
            "counts layers",
        )
        return
    end = len(asked.model.layers) - 1
    # Embedding and head are never recomputed. Like Megatron-LM's block method, a number that is
    # larger than a short chunk means all of it; none may be larger than every chunk.
    most = max(min(chunk.stop, end) - max(chunk.start, 1) for chunk in stage.chunks)
    if not 1 <= count <= most:
        yield (
            Rule.RECOMPUTE,
            f"{where}.layers",
            f"{count}; the stage's longest layer range has {most} transformer layers",
        )


def boundaries(asked: Asked) -> Found:
    """One boundary between each two neighbours, with the transport of their link."""
    rule = Rule.BOUNDARIES
    for p, pipeline in enumerate(asked.plan.pipelines):
        field = f"pipelines[{p}].boundaries"
        if len(pipeline.boundaries) != len(pipeline.stages) - 1:
            message = f"{len(pipeline.boundaries)} for {len(pipeline.stages)} stages"
            yield rule, field, message
            continue
        for b, (boundary, (left, right)) in enumerate(
            zip(pipeline.boundaries, pairwise(pipeline.stages), strict=True)
        ):
            where = f"{field}[{b}]"
            if boundary.index != b:
                message = f"{boundary.index}; boundaries stand in order, this is {b}"
                yield rule, f"{where}.index", message
            yield from _format(rule, f"{where}.precision", boundary.precision)
            both = np.concatenate([stage_array(left), stage_array(right)])
            yield from _transport(asked, rule, where, boundary.transport, both)


def _format(rule: Rule, field: str, found: str) -> Found:
    if found not in [each.value for each in Precision]:
        yield rule, field, f"{found!a}; it is one of {', '.join(Precision)}"


def _transport(asked: Asked, rule: Rule, where: str, found: str, devices: Devices) -> Found:
    try:
        wanted = asked.places.group_transport(devices)
    except InputError as error:
        yield rule, where, str(error)
        return
    if found not in [each.value for each in Transport]:
        yield rule, f"{where}.transport", f"{found!a}; it is one of {', '.join(Transport)}"
    elif found != wanted.value:
        yield rule, f"{where}.transport", f"{found}; the link between its devices is {wanted}"


def sharding(asked: Asked) -> Found:
    """Shards divide the copies of every stage, there is something to shard, and gradients that are
    sharded have one format, because a stage reduces them microbatch by microbatch.
    """
    plan, rule = asked.plan, Rule.SHARDING
    shards = plan.optimizer_shards
    if shards < 1:
        yield rule, "optimizer_shards", f"{shards}; at least 1"
        return
    if (plan.sharding is Sharding.NONE) != (shards == 1):
        yield (
            rule,
            "sharding",
            f"{plan.sharding} with optimizer_shards {shards}; none belongs to 1 shard, anything "
            "else to more",
        )
        return
    formats = reduction_formats(plan)
    if plan.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS) and len(formats) > 1:
        yield (
            rule,
            "reduction_groups",
            f"precision {', '.join(map(ascii, formats))} with sharding {plan.sharding}; sharded "
            "gradients are reduced in one format",
        )
    stages = [stage for _, _, stage in asked.stages()]
    every = math.lcm(*(stage_copies(stage) for stage in stages))
    if shards == every:
        return  # every stage shards over all of its ranks, and so do its experts
    experts = bool(asked.experts_at(0, len(asked.model.layers)))
    for copies, of_expert in sorted({(stage_copies(each), expert_copies(each)) for each in stages}):
        if copies % shards:
            message = (
                f"{shards} does not divide dp x cp {copies}; use a divisor of it, or {every} for "
                "all ranks of every stage"
            )
            yield rule, "optimizer_shards", message
        elif shards > 1 and experts and of_expert % (copies // shards):
            # Experts are sharded inside the same groups: as many copies of their state are kept.
            yield (
                rule,
                "optimizer_shards",
                f"{shards} shards of {copies} copies keep {copies // shards} copies of the "
                f"optimizer state, which does not divide the {of_expert} copies of an expert",
            )


def tied(asked: Asked) -> Found:
    """Which devices keep their copies of a tied matrix equal."""
    pipelines = [pipeline.stages for pipeline in asked.plan.pipelines]
    tied = asked.model.tied_embeddings and any(len(stages) > 1 for stages in pipelines)
    ends = [stage_array(stage) for stages in pipelines for stage in (stages[0], stages[-1])]
    wanted = np.unique(np.concatenate(ends)) if tied else np.empty(0, dtype=np.int64)
    listed = device_array(asked.plan.tied_embedding_devices)
    if not np.array_equal(np.unique(listed), wanted) or (listed.size > wanted.size):
        yield (
            Rule.TIED,
            "tied_embedding_devices",
            "must be the devices of the first and the last stage, each once, whose copies of the "
            "tied matrix would drift apart otherwise"
            if tied
            else "must be empty: no two stages share a tied matrix",
        )
    found, field = asked.plan.tied_embedding_precision, "tied_embedding_precision"
    if found is not None and not tied:
        yield Rule.TIED, field, f"{found!a}; must be null: no two stages share a tied matrix"
    elif tied:
        yield from _format(Rule.TIED, field, "null" if found is None else found)


def reductions(asked: Asked) -> Found:
    """Every copy of every weight meets all the others in exactly one group."""
    total = len(asked.model.layers)
    groups = asked.plan.reduction_groups
    for g, group in enumerate(groups):
        if not 0 <= group.layers.start < group.layers.stop <= total:
            yield (
                Rule.REDUCTION,
                f"reduction_groups[{g}].layers",
                f"{group.layers.start} to {group.layers.stop} are not in 0 to {total}, or empty",
            )
            return
        yield from _format(Rule.REDUCTION, f"reduction_groups[{g}].precision", group.precision)
    cuts = [cut for group in groups for cut in (group.layers.start, group.layers.stop)]
    pieces = [*holders([each.stages for each in asked.plan.pipelines], total, cuts)]
    starts = {piece.layers.start: at for at, piece in enumerate(pieces)}
    covering: list[list[int]] = [[] for _ in pieces]
    for g, group in enumerate(groups):
        at = starts[group.layers.start]
        while at < len(pieces) and pieces[at].layers.start < group.layers.stop:
            covering[at].append(g)
            at += 1
    told: set[int] = set()
    for piece, found in zip(pieces, covering, strict=True):
        yield from _covered(asked, piece, found, told)
    for g, group in enumerate(groups):
        where = f"reduction_groups[{g}]"
        if group.members and g not in told:
            members = device_array(group.members)
            yield from _transport(asked, Rule.REDUCTION, where, group.transport, members)


def _covered(asked: Asked, piece: Holders, found: Sequence[int], told: set[int]) -> Found:
    """Faults of the groups that cover one piece; groups in `told` were named before."""
    groups = asked.plan.reduction_groups
    layers = f"layers {piece.layers.start} to {piece.layers.stop}"
    experts = bool(asked.experts_at(piece.layers.start, piece.layers.stop))
    apart = experts and piece.experts_apart
    members: Devices | None = None
    for expert, copies in ((False, piece.copies), (True, piece.expert_copies if apart else 1)):
        mine = [g for g in found if groups[g].expert is expert]
        what = "routed experts" if expert else "weights"
        if len(mine) != (copies > 1):
            yield (
                Rule.REDUCTION,
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
                yield Rule.REDUCTION, f"reduction_groups[{g}].{field}", message


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
