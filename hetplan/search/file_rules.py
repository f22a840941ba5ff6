"""What the parts of a plan file must have in common: names, numbers, sums, bounds.

The seal tells a file that was changed from one that hetplan wrote. These rules are for what the
seal cannot tell: it is a digest that anybody can make. Each is a comparison of numbers in the file;
whether its prices and its bound are right is `hetplan verify`'s question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal

from hetplan.cost.energy.energy import power_use
from hetplan.cost.estimate_values import ComponentSeconds, Estimate
from hetplan.errors import Fault
from hetplan.plans.check import check_plan
from hetplan.plans.check_job import check_job_against
from hetplan.plans.rules import Rule
from hetplan.plans.targets import TARGETS
from hetplan.search.result import Inputs, SearchResult

MAX_PER_NAME = 200
"""Characters of a name; a list of node names in one text has as many."""
SAME = 1e-9
"""Two ways of adding up the same numbers differ by less than this part of them."""
STATUSES = ("optimal", "limit", "interrupted", "open")
_AGAIN = "price the plan again with hetplan estimate"
_LEAST_STEP = 1e-9  # seconds: no kernel starts in less
_LEAST, _MOST = 1e-30, 1e30
"""Beyond what plan files hold: FLOPs, bytes and seconds, and their differences."""
_NOT_NEGATIVE = ("_seconds", "_bytes", "_per_second", "_flops")


def faults(result: SearchResult) -> tuple[Fault, ...]:
    """Every rule that the result breaks, with the field that does."""
    unfit = (*_names(result.inputs), *_idle(result))
    if unfit:
        return unfit  # other faults would print these names
    found = (*layout_faults(result), *_numbers(result))
    found = found or (*_estimate(result), *_certificate(result), *_others(result))
    return found or tuple(_power(result))


def layout_faults(result: SearchResult) -> tuple[Fault, ...]:
    """The same of the inputs and the plan alone, whatever price the file has."""
    inputs = result.inputs
    plan = check_plan(result.plan, inputs.model, inputs.cluster, inputs.job)
    return (
        *_names(inputs),
        *(_under("inputs.job", fault) for fault in _job(inputs)),
        *(_under("plan", fault) for fault in plan),
    )


def _power(result: SearchResult) -> Iterator[Fault]:
    """Power limits that the priced plan breaks; of nodes and cores `check_plan` tells."""
    inputs = result.inputs
    for each in power_use(result.plan, result.estimate, inputs.cluster, inputs.job):
        if each.is_broken:
            yield Fault(field="plan", message=f"{each.words()} [{Rule.LIMITS}]")


def _under(part: str, fault: Fault) -> Fault:
    field = f"{part}.{fault.field}".rstrip(".").replace(".[", "[")
    return Fault(field=field, message=fault.message)


def _names(inputs: Inputs) -> Iterator[Fault]:
    """Names are words that a terminal can show: input files have only such, a plan edited by hand
    may hold control characters.
    """
    cluster = inputs.cluster
    names = [("model", inputs.model.name), ("cluster", cluster.name), ("job", inputs.job.name)]
    for at, island in enumerate(cluster.islands):
        where = f"cluster.islands[{at}]"
        names += [
            (where, island.name),
            (where, island.region),
            (f"{where}.device", island.device.kind),
            (f"{where}.device", island.device.vendor),
            *((f"{where}.node_names", name) for name in island.node_names),
        ]
    for field, name in names:
        if not (name.isprintable() and 1 <= len(name) <= MAX_PER_NAME):
            message = f"has the name {name[:40]!a}; a name has 1 to {MAX_PER_NAME} printable "
            yield Fault(field=f"inputs.{field}", message=message + "characters")


def _job(inputs: Inputs) -> Iterator[Fault]:
    yield from check_job_against(inputs.job, inputs.model, inputs.cluster, searched=False)
    if inputs.job.target not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        yield Fault(field="target", message=f"{inputs.job.target!a}; known targets: {known}")


def _idle(result: SearchResult) -> Iterator[Fault]:
    """Reasons that name no island of the cluster, or more devices than it has."""
    usable = {each.name: each.num_usable_devices for each in result.inputs.cluster.islands}
    for at, each in enumerate(result.idle):
        if each.island not in usable:
            message = "no such island; ask for the reasons again"
            yield Fault(field=f"idle[{at}].island", message=message)
        elif not 0 <= each.idle_devices <= each.usable_devices <= usable[each.island]:
            message = f"of the island's {usable[each.island]}; ask for the reasons again"
            yield Fault(field=f"idle[{at}].idle_devices", message=message)


def _numbers(result: SearchResult) -> Iterator[Fault]:
    """The first number of each part that nothing can have, or less than nothing of something."""
    for part in fields(result):
        for place, number in _leaves(getattr(result, part.name), part.name):
            if not abs(number) <= _MOST:
                # A whole number may be larger than any float.
                shown = f"{Decimal(number) if isinstance(number, int) else number:.6g}"
                message = f"{shown}; no plan has a number above {_MOST:g}: {_AGAIN}"
                yield Fault(field=place, message=message)
                break
            if not place.endswith(_NOT_NEGATIVE):
                continue
            if 0 < abs(number) < _LEAST:
                message = f"{number:g}; figures are 0 or at least {_LEAST:g}: {_AGAIN}"
                yield Fault(field=place, message=message)
                break
            # Differences of times are as far below 0 as their rounding.
            if number < -SAME:
                yield Fault(field=place, message=f"{number:g}; it cannot be below 0: {_AGAIN}")
                break


def _leaves(value: object, place: str) -> Iterator[tuple[str, float]]:
    """All numbers within a value, with their fields."""
    if isinstance(value, float | int):
        yield place, value
    elif isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{place}[{at}]")
    elif is_dataclass(value):
        for each in fields(value):
            yield from _leaves(getattr(value, each.name), f"{place}.{each.name}")


def _estimate(result: SearchResult) -> Iterator[Fault]:
    """What a run is compared with must be of this plan, and its parts must make the step."""
    estimate, job = result.estimate, result.inputs.job
    stages = sum(len(pipeline.stages) for pipeline in result.plan.pipelines)
    if len(estimate.stages) != stages:
        message = f"has {len(estimate.stages)} entries, the plan {stages} stages"
        yield Fault(field="estimate.stages", message=message)
    step = estimate.step_seconds
    if not step >= _LEAST_STEP:
        message = f"{step}; a step takes more than 0 seconds; {_AGAIN}"
        yield Fault(field="estimate.step_seconds", message=message)
        return
    tokens = job.global_batch_size * job.sequence_length / step
    if not math.isclose(estimate.tokens_per_second, tokens, rel_tol=SAME):
        message = f"{estimate.tokens_per_second:g}; batch, length and step make it {tokens:g}"
        yield Fault(field="estimate.tokens_per_second", message=message)
    low, high, _ = estimate.step_range
    if not 0 < low <= high:
        field = "interval" if estimate.p95_seconds is None else "p95_seconds"
        message = f"the interval is from {low:g} to {high:g} s; {_AGAIN}"
        yield Fault(field=f"estimate.{field}", message=message)
    yield from _sum_of(estimate.components, step, "estimate.components")
    kinds = {island.device.kind for island in result.inputs.cluster.islands}
    for at, use in enumerate(estimate.kinds):
        if use.device not in kinds:
            message = f"{use.device[:40]!a} is no kind of the cluster; {_AGAIN}"
            yield Fault(field=f"estimate.kinds[{at}].device", message=message)
    yield from _stages(estimate, searched=result.certificate is not None)


def _stages(estimate: Estimate, *, searched: bool) -> Iterator[Fault]:
    for at, stage in enumerate(estimate.stages):
        field, memory = f"estimate.stages[{at}]", stage.memory
        if not memory.available_bytes > 0:
            message = f"{memory.available_bytes}; a device has memory; {_AGAIN}"
            yield Fault(field=f"{field}.memory.available_bytes", message=message)
        elif searched and not memory.fits:
            message = f"needs {memory.total_bytes:.6g} of {memory.available_bytes:.6g} bytes; a "
            yield Fault(field=f"{field}.memory", message=f"{message}plan that was searched fits")
        yield from _sum_of(stage.components, estimate.step_seconds, f"{field}.components")


def _sum_of(parts: Sequence[ComponentSeconds], step: float, field: str) -> Iterator[Fault]:
    """Parts of a step that do not add up to it."""
    total = math.fsum(each.seconds for each in parts)
    if parts and not math.isclose(total, step, rel_tol=_ADDED_UP):
        yield Fault(field=field, message=f"add up to {total:g} s, the step is {step:g} s; {_AGAIN}")


_ADDED_UP = 1e-6
"""Of thousands of passes, each rounded once."""


def _certificate(result: SearchResult) -> Iterator[Fault]:
    """Bound, gap and status fit together and to the step."""
    certificate, step = result.certificate, result.estimate.step_seconds
    if certificate is None:
        return
    bound = certificate.lower_bound_seconds
    if not 0.0 <= bound <= step * (1.0 + SAME):
        message = f"{bound!r} s, but the plan's own step takes {step!r} s"
        yield Fault(field="certificate.lower_bound_seconds", message=message)
        return
    gap = 1.0 - bound / step
    if not math.isclose(certificate.gap, gap, rel_tol=SAME, abs_tol=SAME):
        message = f"{certificate.gap!r}; step and bound make it {gap!r}"
        yield Fault(field="certificate.gap", message=message)
    if certificate.status not in STATUSES:
        message = f"{certificate.status[:40]!a} is no status"
        yield Fault(field="certificate.status", message=message)
    if certificate.status == "optimal" and gap > result.inputs.job.gap + 1e-6:
        message = f"optimal, with a gap above the job's {result.inputs.job.gap:g}"
        yield Fault(field="certificate.status", message=message)


def _others(result: SearchResult) -> Iterator[Fault]:
    """What is said of other plans and of another target."""
    inputs = result.inputs
    for at, each in enumerate(result.alternatives):
        field = f"alternatives[{at}]"
        for fault in check_plan(each.plan, inputs.model, inputs.cluster, inputs.job):
            yield _under(f"{field}.plan", fault)
        if not each.step_seconds >= _LEAST_STEP:
            message = f"{each.step_seconds}; a step takes more than 0 seconds"
            yield Fault(field=f"{field}.step_seconds", message=message)
    other, alone = result.restriction, result.alone
    times = [] if other is None else [("restriction.step_seconds", other.step_seconds)]
    if alone is not None:
        times += [("alone.kind.tokens_per_second", alone.kind.tokens_per_second)]
    if result.certificate is not None:
        times += [
            (f"certificate.course[{at}].best_seconds", each.best_seconds)
            for at, each in enumerate(result.certificate.course)
        ]
    for field, number in times:
        if not number > 0:
            yield Fault(field=field, message=f"{number:g}; it is above 0: {_AGAIN}")
    if other is not None and not other.lower_bound_seconds <= other.step_seconds * (1.0 + SAME):
        message = f"{other.lower_bound_seconds:g} s, above the step of {other.step_seconds:g} s"
        yield Fault(field="restriction.lower_bound_seconds", message=message)
