"""Whether a plan is legal: every rule a plan must obey, checked in one place.

Used on plans that were searched, built from a layout or read from a file. Each fault names the
rule that is broken (`hetplan.plans.rules`), the place and what was found. Rules come in three
rows, and a row is asked only where the ones before it hold: which devices there are; which layers
and devices each stage has; everything that follows from those.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_stages import (
    boundaries,
    degrees,
    devices_exist,
    devices_once,
    layers,
    nodes,
    recompute,
    reductions,
    sharding,
    tied,
)
from hetplan.plans.check_target import (
    batch,
    schedule,
    sequence,
    settings,
    target_limits,
    vocabulary,
)
from hetplan.plans.pieces import Places
from hetplan.plans.plan import Plan
from hetplan.plans.rules import Asked, Found, faults

_Check: TypeAlias = Callable[[Asked], Found]

# Later rules list ranges device by device and divide by degrees: one zero too many would fill the
# memory, one degree of 0 would end the program.
_ROWS: tuple[tuple[_Check, ...], ...] = (
    (devices_exist,),
    (settings, layers, devices_once, degrees),
    (
        nodes,
        recompute,
        sequence,
        batch,
        schedule,
        boundaries,
        vocabulary,
        sharding,
        reductions,
        tied,
        target_limits,
    ),
)


def check_plan(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> tuple[Fault, ...]:
    """Every rule that the plan breaks; empty when it is legal and its target can express it."""
    asked = Asked(plan=plan, model=model, cluster=cluster, job=job, places=Places(cluster=cluster))
    for row in _ROWS:
        found = tuple(chain.from_iterable(check(asked) for check in row))
        if found:
            return faults(found)
    return ()
