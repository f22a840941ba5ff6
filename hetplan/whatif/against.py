"""Why not another plan? The plan that the user expected beside the one that was found.

The other plan is held to the same model, cluster and job: it may be illegal there, too large for
its devices, or slower; then the step is set beside the step, component by component along both
critical paths, and choice by choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.check import check_plan
from hetplan.plans.pinned import different, pinned_values
from hetplan.plans.plan import Plan, Replica, Sharding, Stage
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import devices_in_use
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One thing that the two plans decide differently, in words."""

    name: str
    found: str
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentChange:
    """Seconds of one component on the critical paths of both plans."""

    component: Component
    found_seconds: float
    other_seconds: float

    @property
    def more_seconds(self) -> float:
        """What the other plan spends more on it."""
        return self.other_seconds - self.found_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The verdict."""

    illegal: tuple[str, ...]
    """What the other plan breaks, with its field; empty where it is legal."""
    choices: tuple[Choice, ...]
    found_seconds: float
    other_seconds: float | None
    """None where it cannot be priced."""
    components: tuple[ComponentChange, ...]
    """Largest difference first."""
    below_bound: bool
    """The other plan is faster than the certificate says any plan of the space can be: it is
    outside of what was searched."""
    inputs_differ: tuple[str, ...]
    """Which inputs the other file was made for instead."""


def against(result: SearchResult, other: SearchResult, predictor: Predictor) -> Against:
    """Set another plan beside the result's, under the result's inputs."""
    inputs = result.inputs
    illegal = _illegal(other.plan, result)
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    found = estimate_with(pricer, result.plan)
    priced: Estimate | None = None
    if not illegal or _sound(other.plan, result):
        priced = estimate_with(pricer, other.plan)
        illegal = (*illegal, *_too_large(priced))
    certificate = result.certificate
    return Against(
        illegal=illegal,
        choices=tuple(choices(result.plan, other.plan, inputs.cluster)),
        found_seconds=found.step_seconds,
        other_seconds=None if priced is None else priced.step_seconds,
        components=() if priced is None else _components(found, priced),
        below_bound=priced is not None
        and not illegal
        and certificate is not None
        and priced.step_seconds < certificate.lower_bound_seconds * (1 - 1e-9),
        inputs_differ=tuple(
            name
            for name in ("model", "cluster", "job")
            if getattr(inputs, name) != getattr(other.inputs, name)
        ),
    )


def _illegal(plan: Plan, result: SearchResult) -> tuple[str, ...]:
    inputs = result.inputs
    faults = check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    return tuple(f"{fault.field}: {fault.message}" for fault in faults)


def _sound(plan: Plan, result: SearchResult) -> bool:
    """Whether only its target cannot run it: then it has a price all the same."""
    inputs = result.inputs
    job = replace(inputs.job, target="any")
    return not check_plan(replace(plan, target="any"), inputs.model, inputs.cluster, job)


def _too_large(estimate: Estimate) -> Iterator[str]:
    for number, stage in enumerate(estimate.stages):
        if not stage.memory.fits:
            yield (
                f"stage {number} on {stage.island} needs "
                f"{format_bytes(stage.memory.total_bytes)} of "
                f"{format_bytes(stage.memory.available_bytes)} per device"
            )


def _components(found: Estimate, other: Estimate) -> tuple[ComponentChange, ...]:
    def seconds(estimate: Estimate, component: Component) -> float:
        return sum(each.seconds for each in estimate.components if each.component is component)

    changes = [
        ComponentChange(
            component=component,
            found_seconds=seconds(found, component),
            other_seconds=seconds(other, component),
        )
        for component in Component
    ]
    differ = [each for each in changes if each.more_seconds]
    return tuple(sorted(differ, key=lambda each: -abs(each.more_seconds)))


def choices(
    found: Plan, other: Plan, cluster: Cluster, others: Cluster | None = None
) -> Iterator[Choice]:
    """Everything that two plans decide differently; `others` is the other plan's own cluster."""
    one, two = _described(found, cluster), _described(other, others or cluster)
    for name in one:
        if one[name] != two[name]:
            yield Choice(name=name, found=one[name], other=two[name])


def _described(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """What is chosen, by name, in words."""
    has = pinned_values(plan)
    stages, replicas = plan.stages, plan.replicas

    def place(replica: Replica) -> str:
        device = replica.devices[0].start
        return cluster.island_of_device(device).name if device < cluster.num_devices else "nowhere"

    sharding = plan.sharding.value
    if plan.sharding is not Sharding.NONE:
        sharding += f" over {plan.optimizer_shards}"
    return {
        "target": plan.target,
        "islands": different(place(replica) for replica in replicas),
        "pipelines": has["pipelines"],
        "stages": has["pp"],
        "layers, embedding and head": ", ".join(_chunks(stage) for stage in stages),
        "tp": has["tp"],
        "cp": has["cp"],
        "ep": has["ep"],
        "dp": has["dp"],
        "microbatch size": has["microbatch_size"],
        "microbatches": different(pipeline.num_microbatches for pipeline in plan.pipelines),
        "sequence parallelism": different(
            "yes" if replica.sequence_parallel else "no" for replica in replicas
        ),
        "recompute": different(stage.recompute.words for stage in stages),
        "schedule": different(
            f"{pipeline.schedule.name} x {pipeline.schedule.virtual_stages}"
            for pipeline in plan.pipelines
        ),
        "microbatches in flight": different(stage.warmup_depth for stage in stages),
        "sharded": sharding,
        "part of the optimizer in host memory": has["optimizer_offload"],
        "devices used": f"{devices_in_use(plan):,}",
        "padded vocabulary": str(plan.padded_vocab_size),
    }


def _chunks(stage: Stage) -> str:
    return "+".join(str(chunk.stop - chunk.start) for chunk in stage.chunks)
