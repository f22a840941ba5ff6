"""Local steps: every site trains the whole model by itself, and sites are averaged now and then.

    differences = weights at the last averaging - weights now      at each site, of a fragment
    mean        = sum over sites of differences * the site's part of the batch
    weights     = SGD with Nesterov momentum on the mean, from the weights at the last averaging

(DiLoCo, arXiv 2311.08105.) Fragments of the layers take turns, one every sync_steps / num_fragments
steps (Streaming DiLoCo, arXiv 2501.18512). Sites count by their parts of the batch, so that
averaging after every step of SGD is the synchronous step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job, Sharding, Synchronisation
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_plan, reduction_groups
from hetplan.plans.formats import reduction_precision
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import LayerRange, OuterSynchronisation, Plan
from hetplan.plans.rules import CheckedPlan, Found


def local_steps_plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    sites: Sequence[Plan],
    like: Plan,
) -> Plan:
    """The plan in which these plans, of one site each, are averaged; sharded and overlapped alike.

    Where `like` shards, every stage shards over all of its ranks. InputError where the job allows
    no local steps.
    """
    wanted = job.synchronisation
    if wanted is None:
        raise InputError(f"{job.name} allows no local steps; give it synchronisation")
    pipelines = [pipeline for site in sites for pipeline in site.pipelines]
    every = math.lcm(*(stage_copies(stage) for site in sites for stage in site.stages))
    shards = 1 if like.sharding is Sharding.NONE else every
    plan = assemble_plan(
        model,
        cluster,
        job,
        pipelines,
        sharding=like.sharding if shards > 1 else Sharding.NONE,
        optimizer_shards=shards,
        overlap=like.overlap,
    )
    summed = reduction_precision(job)
    inside = (reduction_groups(model, cluster, site.pipelines, summed) for site in sites)
    outer = OuterSynchronisation(
        sites=tuple(len(site.pipelines) for site in sites),
        reduction_groups=reduction_groups(model, cluster, pipelines, wanted.precision),
        settings=wanted,
    )
    return replace(plan, reduction_groups=tuple(chain(*inside)), outer=outer)


def fragments(model: ModelSpec, count: int) -> tuple[LayerRange, ...]:
    """The layers of each fragment: equal numbers of transformer layers, as far as possible."""
    cuts = [1 + model.num_layers * at // count for at in range(1, count)]
    ends = (0, *cuts, len(model.layers))
    return tuple(LayerRange(start=start, stop=stop) for start, stop in pairwise(ends))


def common_layers(one: LayerRange, two: LayerRange) -> LayerRange | None:
    """The layers of both; None where there are none."""
    start, stop = max(one.start, two.start), min(one.stop, two.stop)
    return LayerRange(start=start, stop=stop) if start < stop else None


def setting_faults(wanted: Synchronisation, num_layers: int) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) of settings that do not go together."""
    count, steps, delay = wanted.num_fragments, wanted.sync_steps, wanted.fragment_sync_delay
    if count > num_layers:
        yield "num_fragments", f"{count} for {num_layers} transformer layers; at most one a layer"
    if steps % count:
        yield "num_fragments", f"{count} does not divide sync_steps {steps}; use a divisor"
    elif delay >= steps // count:
        turn = f"sync_steps {steps} / num_fragments {count} = {steps // count} steps"
        message = f"{delay}; a fragment has {turn}, of which fewer may pass beside its averaging"
        yield "fragment_sync_delay", message


def outer(checked: CheckedPlan) -> Found:
    """Sites have pipelines, the target averages them, and as the job says."""
    plan, wanted, found = checked.plan, checked.job.synchronisation, checked.plan.outer
    if found is None:
        return
    if len(found.sites) < 2 or min(found.sites) < 1 or sum(found.sites) != len(plan.pipelines):
        message = f"{[*found.sites]} of {len(plan.pipelines)} pipelines; two sites or more"
        yield "outer.sites", f"{message}, which have every pipeline once"
    if checked.trainer is not None and not checked.trainer.local_steps:
        yield "outer", f"target {plan.target} has no local steps"
    if wanted is None:
        yield "outer", "the job allows no local steps; give it synchronisation"
    elif found.settings != wanted:
        yield "outer.settings", "are not the job's synchronisation"
    for name, message in setting_faults(found.settings, checked.model.num_layers):
        yield f"outer.settings.{name}", message
    for g, group in enumerate(found.reduction_groups):
        if group.precision != found.settings.precision:
            message = f"{group.precision} is not that of the settings, {found.settings.precision}"
            yield f"outer.reduction_groups[{g}].precision", message
