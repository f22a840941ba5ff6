"""What a plan has where a job could have a pin, and whether it is what the job pins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetplan.cluster.names import meant_kind
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import data_ranks
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding


def with_named_ends(job: Job, cluster: Cluster) -> Job:
    """The job with the catalogue's names of device kinds in pins, failure rates and variations."""
    kinds = [island.device for island in cluster.islands]
    islands = {island.name for island in cluster.islands}

    def meant(name: str | None) -> str | None:
        if name is None or name in islands:
            return name
        try:
            return meant_kind(name, kinds).kind
        except InputError:
            return name  # `check_job` says what is wrong with it

    first, last = meant(job.pin.embedding_on), meant(job.pin.head_on)
    named = tuple(replace(each, kind=meant(each.kind) or "") for each in job.run.kind_failures)
    pin = replace(job.pin, embedding_on=first, head_on=last)
    vary = tuple(
        replace(each, of=(meant(each.of[0]) or "",)) if len(each.of) == 1 else each
        for each in job.vary
    )
    if pin == job.pin and named == job.run.kind_failures and vary == job.vary:
        return job
    return replace(job, pin=pin, vary=vary, run=replace(job.run, kind_failures=named))


def keeps_pins(plan: Plan, cluster: Cluster, job: Job) -> bool:
    """Whether a plan for this cluster has what the job pins; False too where it cannot be told."""
    pin, has = job.pin, pinned_values(plan)
    ends = [(place, end) for place, end in ((pin.embedding_on, 0), (pin.head_on, -1)) if place]
    shapes = {Shape.of(replica) for replica in plan.replicas}
    return (
        all(
            text == str(getattr(pin, name)).lower()
            for name, text in has.items()
            if getattr(pin, name) is not None
        )
        and all(
            place in (island.name, island.device.kind)
            for place, end in ends
            for pipeline in plan.pipelines
            for replica in pipeline.stages[end].replicas
            for island in [cluster.island_of_device(replica.devices[0].start)]
        )
        and all(
            pin.sequence_parallel in (None, shape.sequence_parallel)
            for shape in shapes
            if shape.tp > 1
        )
        and not (pin.same_degrees and len(shapes) > 1)
        and (pin.depth is None or (pin.depth == 0 and not plan.overlap.send))
    )


def pinned_values(plan: Plan) -> dict[str, str]:
    """What the plan has under the name of each pin; `4/8` where its parts differ."""
    pipelines, stages, replicas = plan.pipelines, plan.stages, plan.replicas
    values: dict[str, Iterable[object]] = {
        "tp": (replica.tp for replica in replicas),
        "cp": (replica.cp for replica in replicas),
        "ep": (replica.ep for replica in replicas),
        "dp": (data_ranks(stage) for stage in stages),
        "pp": (len(pipeline.stages) for pipeline in pipelines),
        "pipelines": (len(pipelines),),
        "microbatch_size": (replica.microbatch_size for replica in replicas),
        "virtual_stages": (pipeline.schedule.virtual_stages for pipeline in pipelines),
        "schedule": (pipeline.schedule.name for pipeline in pipelines),
        "recompute": (
            stage.recompute.granularity is not RecomputeGranularity.NONE for stage in stages
        ),
        "sharded_optimizer": (plan.sharding is not Sharding.NONE,),
        "recompute_modules": (stage.recompute.words for stage in stages),
        "sharding": (plan.sharding.value,),
        "optimizer_offload": (f"{plan.optimizer_offload:g}",),
    }
    return {name: different(each) for name, each in values.items()}


def different(values: Iterable[object]) -> str:
    """The different values in the order in which they come, as in `4/8` or `true/false`."""
    words = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return "/".join(dict.fromkeys(words))
