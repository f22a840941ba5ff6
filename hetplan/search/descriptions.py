"""Searches and plans in words: what a certificate covers (docs/search.md), solvers, layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetplan.job.spec import Job, Pins
from hetplan.plans.plan import Plan
from hetplan.plans.targets import target
from hetplan.search.solver import RESOLUTION, Solver
from hetplan.search.space.family import Family, FamilyTable, Mesh
from hetplan.search.space.stage_table import MAX_FREE_ISLANDS
from hetplan.units import format_each


def describe_space(
    table: FamilyTable, job: Job, *, several: bool, one_library: bool = False
) -> str:
    """What was searched and what was fixed; `several`: with plans of several pipelines;
    `one_library`: of a cluster that has more than one.
    """
    trainer = target(job.target)
    families, meshes = table.first_of_each_kind(), table.meshes()
    shapes = {id(shape): shape for mesh in meshes for shape in mesh.shapes}.values()
    searched = [
        f"{name} {_values(getattr(shape, field) for shape in shapes)}"
        for name, field in (
            ("tp", "tp"),
            ("cp", "cp"),
            ("dp", "dp"),
            ("ep", "ep"),
            ("microbatch size", "microbatch_size"),
        )
    ]
    recompute = _words(each.words for family in families for each in family.recompute)
    searched.append(f"recompute {recompute}{_each(trainer.recompute_per_stage)}")
    searched.append(f"schedules {_schedules(families)}")
    searched.append(f"sharding {_words(family.sharding.value for family in families)}")
    if any(family.offload for family in families):
        parts = _words(f"{family.offload:.0%}" for family in families)
        searched.append(f"{parts} of the optimizer in host memory")
    if any(family.early_sends for family in families):
        deepest = max(family.most_extra_depth for family in families)
        waiting = any(not family.early_sends for family in families)
        searched.append(
            ("sends that wait, and sends that do not" if waiting else "sends that do not wait")
            + (f", these with a warm-up up to {deepest} deeper than 1F1B's" if deepest else "")
        )
    searched.append("which islands, their order, stages per island, layers per stage")
    if any(len(mesh.islands) > 1 and len(set(mesh.shapes)) == 1 for mesh in meshes):
        searched.append("data parallelism over 2 to 4 islands of one kind in every stage")
    if any(len(set(mesh.shapes)) > 1 for mesh in meshes):
        searched.append("stages of two islands with shapes of their own")
    fixed = ["devices of one library of collectives"] if one_library else []
    fixed += _fixed(families, meshes, job, several=several)
    return (
        f"{'one or more pipelines' if several else 'one pipeline'} for {job.target}; searched: "
        f"{'; '.join(searched)}. Fixed: {', '.join(fixed)}. "
        f"Every boundary is searched with its links for itself; where boundaries share one, the "
        f"plan's own price has it, and the gap counts the difference. "
        f"Steps closer than {RESOLUTION:g} of each other count as equal."
    )


def _fixed(
    families: Sequence[Family], meshes: Sequence[Mesh], job: Job, *, several: bool
) -> tuple[str, ...]:
    """What was decided without a search; pins of the job are such too."""
    trainer, pin = target(job.target), job.pin
    islands = {island for mesh in meshes for island in mesh.islands}
    found = [
        "stages of a mesh next to each other",
        "whole layer units",
        "an extra warm-up depth is the same for all stages of a mesh, none on the last one"
        if any(family.most_extra_depth for family in families)
        else "",
        "sequence parallelism wherever it can be"
        if trainer.sequence_parallel and pin.sequence_parallel is None
        else "",
        "several pipelines send in the usual way, with the usual warm-up"
        if several and any(family.early_sends for family in families)
        else "",
        "several pipelines: each one's microbatch divides the global batch" if several else "",
        "" if trainer.stages_differ else "the same degrees for all stages",
        "chunks of a stage as even as they can be" if _interleaved(families) else "",
        "interleaving only where the stages divide the microbatches and are 3 or more"
        if _interleaved(families)
        else "",
        f"meshes of a region next to each other (more than {MAX_FREE_ISLANDS} islands)"
        if len(islands) > MAX_FREE_ISLANDS
        else "",
        "pins of the job" if pin != Pins() else "",
    ]
    return tuple(filter(None, found))


def _values(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(found)))) or "none"


def _words(found: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(found)) or "none"


def _each(per_stage: bool) -> str:
    return " of each stage" if per_stage else " of all stages"


def _interleaved(families: Sequence[Family]) -> bool:
    return any(family.virtual_stages > 1 for family in families)


def _schedules(families: Sequence[Family]) -> str:
    chunked = [family for family in families if family.schedule == "interleaved-1f1b"]
    found = dict.fromkeys(each.schedule for each in families if each not in chunked)
    if chunked:
        chunks = _values(family.virtual_stages for family in chunked)
        found[f"interleaved-1f1b with {chunks} virtual stages"] = None
    return _words(found)


def describe_solver(solver: Solver) -> str:
    """A solver in words, for the journal."""
    family = getattr(solver, "family", None)
    if not isinstance(family, Family):
        return "several pipelines"
    shape = family.meshes[0].shapes[0]
    chunks = f" v {family.virtual_stages}" if family.virtual_stages > 1 else ""
    degrees = ""
    if all(mesh.shapes == (shape,) for mesh in family.meshes):
        more = "".join(
            f" {name} {value}" for name, value in (("cp", shape.cp), ("ep", shape.ep)) if value > 1
        )
        degrees = f" tp {shape.tp}{more} dp {shape.dp} microbatch size {shape.microbatch_size}"
    recompute = "/".join(each.words for each in family.recompute)
    return (
        f"{family.schedule}{chunks} tick {family.samples}{degrees} recompute {recompute} "
        f"sharding {family.sharding.value}"
        + (f" offload {family.offload:g}" if family.offload else "")
    )


def layout_words(plan: Plan) -> str:
    """Degrees in short, as in `tp 4, dp 16, 11 stages, microbatch size 1`."""
    stages, replicas = plan.stages, plan.replicas

    def some(name: str) -> str:
        return format_each(getattr(each, name) for each in replicas)

    words = [f"tp {some('tp')}"]
    words += [f"{name} {some(name)}" for name in ("cp", "ep") if some(name) != "1"]
    words.append(f"dp {format_each(sum(r.dp for r in stage.replicas) for stage in stages)}")
    if len(plan.pipelines) > 1:
        words.append(f"{len(plan.pipelines)} pipelines")
    depths = format_each(len(p.stages) for p in plan.pipelines)
    words.append(f"{depths} stage{'' if depths == '1' else 's'}")
    words.append(f"microbatch size {some('microbatch_size')}")
    chunks = format_each(p.schedule.virtual_stages for p in plan.pipelines)
    if chunks != "1":
        words.append(f"{chunks} chunks")
    recompute = format_each(stage.recompute.words for stage in stages)
    if recompute != "none":
        words.append(f"recompute {recompute}")
    if plan.optimizer_offload:
        words.append("optimizer in host memory")
    return ", ".join(words)


def devices_in_use(plan: Plan) -> int:
    """Devices of all stages."""
    return sum(replica.num_devices for replica in plan.replicas)
