"""Local steps: every site trains the whole model by itself, and sites are averaged now and then.

    differences = weights at the last averaging - weights now      at each site, of a fragment
    mean        = sum over sites of differences * the site's part of the batch
    weights     = SGD with Nesterov momentum on the mean, from the weights at the last averaging

(DiLoCo, arXiv 2311.08105.) Fragments of the layers take turns, one every sync_steps / num_fragments
steps (Streaming DiLoCo, arXiv 2501.18512). Sites count by their parts of the batch, so that
averaging after every step of SGD is the synchronous step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Synchronisation
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_plan, reduction_groups
from hetplan.plans.formats import reduction_precision
from hetplan.plans.plan import LayerRange, OuterSynchronisation, OverlapSettings, Plan, Sharding
from hetplan.plans.rules import CheckedPlan, Found

_SHARED = (
    *("sync_steps", "num_fragments", "fragment_sync_delay", "fragment_update_alpha"),
    *("outer_lr", "outer_momentum"),
)
"""Fields that a plan has from its job."""


def local_steps_plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    sites: Sequence[Plan],
    wanted: Synchronisation,
    *,
    sharding: Sharding = Sharding.NONE,
    optimizer_shards: int = 1,
    overlap: OverlapSettings | None = None,
) -> Plan:
    """The plan in which these plans, of one site each, are averaged; they share these settings."""
    pipelines = [pipeline for site in sites for pipeline in site.pipelines]
    plan = assemble_plan(
        model,
        cluster,
        job,
        pipelines,
        sharding=sharding,
        optimizer_shards=optimizer_shards,
        overlap=overlap,
    )
    summed = reduction_precision(job)
    inside = (reduction_groups(model, cluster, site.pipelines, summed) for site in sites)
    outer = OuterSynchronisation(
        sites=tuple(len(site.pipelines) for site in sites),
        reduction_groups=reduction_groups(model, cluster, pipelines, wanted.precision),
        **{name: getattr(wanted, name) for name in _SHARED},
    )
    groups = tuple(group for each in inside for group in each)
    return replace(plan, reduction_groups=groups, outer=outer)


def fragments(num_layers: int, positions: int, count: int) -> tuple[LayerRange, ...]:
    """The layers of each fragment: equal numbers of transformer layers, as far as possible.

    `positions`: of `ModelSpec.layers`, the ends of the model included.
    """
    cuts = [1 + num_layers * at // count for at in range(1, count)]
    return tuple(LayerRange(start=a, stop=b) for a, b in pairwise((0, *cuts, positions)))


def setting_faults(
    wanted: Synchronisation | OuterSynchronisation, num_layers: int
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) of settings that do not go together."""
    count, steps, delay = wanted.num_fragments, wanted.sync_steps, wanted.fragment_sync_delay
    if steps < 1 or count < 1:
        yield "sync_steps", f"{steps} with num_fragments {count}; both are at least 1"
        return
    if count > num_layers:
        yield "num_fragments", f"{count} for {num_layers} transformer layers; at most one a layer"
    if steps % count:
        yield "num_fragments", f"{count} does not divide sync_steps {steps}; use a divisor"
    elif not 0 <= delay < steps // count:
        yield (
            "fragment_sync_delay",
            f"{delay}; a fragment has sync_steps {steps} / num_fragments {count} = "
            f"{steps // count} steps, of which fewer may pass beside its averaging",
        )


def outer(checked: CheckedPlan) -> Found:
    """Sites have pipelines, the target averages them, and as the job says."""
    plan, wanted = checked.plan, checked.job.synchronisation
    found = plan.outer
    if found is None:
        return
    if len(found.sites) < 2 or min(found.sites) < 1 or sum(found.sites) != len(plan.pipelines):
        message = f"{[*found.sites]} of {len(plan.pipelines)} pipelines; two sites or more"
        yield "outer.sites", f"{message}, which have every pipeline once"
    if checked.trainer is not None and not checked.trainer.local_steps:
        yield "outer", f"target {plan.target} has no local steps"
    if wanted is None:
        yield "outer", "the job allows no local steps; give it synchronisation"
        return
    for name in _SHARED:
        if getattr(found, name) != getattr(wanted, name):
            message = f"{getattr(found, name)} is not the job's {getattr(wanted, name)}"
            yield f"outer.{name}", message
    for name, message in setting_faults(found, checked.model.num_layers):
        yield f"outer.{name}", message
    for g, group in enumerate(found.reduction_groups):
        if group.precision != wanted.precision:
            message = f"{group.precision} is not the job's {wanted.precision}"
            yield f"outer.reduction_groups[{g}].precision", message
