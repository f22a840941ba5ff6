"""Which devices talk to each other: boundaries, sharding, reductions and the tied matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hetplan.cluster.spec import Transport
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.plans.formats import reduction_formats
from hetplan.plans.pieces import Holders, expert_copies, holders, stage_copies
from hetplan.plans.places import Devices, device_array, stage_array
from hetplan.plans.plan import ReductionGroup, Sharding
from hetplan.plans.rules import Asked, Found, Rule, some


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
