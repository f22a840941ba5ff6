"""Whether a plan is legal: every rule that a plan must obey, in one table.

Searched plans, layouts and plan files are checked alike. Each fault names the place, what is wrong
and the rule (`hetplan.plans.rules`). A later group of rules is checked only where the groups before
it hold: it lists ranges device by device and divides by degrees, so one zero too many would fill
the memory and a degree of 0 would end the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans import check_stages as stages
from hetplan.plans import check_target as target
from hetplan.plans.local_steps import outer
from hetplan.plans.pieces import Places
from hetplan.plans.plan import Plan
from hetplan.plans.rules import CheckedPlan, Found, Rule

_Check: TypeAlias = Callable[[CheckedPlan], Found]

_GROUPS: tuple[tuple[tuple[Rule, _Check], ...], ...] = (
    ((Rule.DEVICES_EXIST, stages.devices_exist),),
    (
        (Rule.JOB, target.job_settings),
        (Rule.OFFLOAD, target.offload),
        (Rule.OVERLAP, target.overlap),
        (Rule.OUTER, outer),
        (Rule.LAYERS_ONCE, stages.layers_exist),
        (Rule.CHUNKS, stages.chunks),
        (Rule.DEVICES_ONCE, stages.devices_once),
        (Rule.DEGREES, stages.degrees),
    ),
    (
        (Rule.LAYERS_ONCE, stages.layers_once),
        (Rule.LAYERS_IN_ORDER, stages.layers_in_order),
        (Rule.TRANSFORMER_LAYER, stages.transformer_layer),
        (Rule.DEVICES_COUNTED, stages.devices_counted),
        (Rule.EXPERT_DEGREES, stages.expert_degrees),
    ),
    (
        (Rule.NODES_USABLE, stages.nodes_usable),
        (Rule.ONE_ISLAND, stages.one_island),
        (Rule.TP_IN_NODE, stages.tp_in_node),
        (Rule.SLICES, stages.slices),
        (Rule.RECOMPUTE, stages.recompute),
        (Rule.SEQUENCE, target.sequence),
        (Rule.SEQUENCE_PARALLEL, target.sequence_parallel),
        (Rule.BATCH, target.batch),
        (Rule.SCHEDULE, target.schedule),
        (Rule.WARMUP, target.warmup),
        (Rule.BOUNDARIES, stages.boundaries),
        (Rule.VOCABULARY, target.vocabulary),
        (Rule.SHARDING, stages.sharding),
        (Rule.REDUCTION, stages.reductions),
        (Rule.TIED, stages.tied),
        (Rule.TARGET, target.target_limits),
        (Rule.KERNELS, target.kernels),
    ),
)


def check_plan(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> tuple[Fault, ...]:
    """Every rule that the plan breaks; empty when it is legal and its target can express it."""
    checked = CheckedPlan(
        plan=plan, model=model, cluster=cluster, job=job, places=Places(cluster=cluster)
    )
    for group in _GROUPS:
        faults = tuple(
            Fault(field=field, message=f"{message} [{rule}]")
            for rule, check in group
            for field, message in check(checked)
        )
        if faults:
            return faults
    return ()
