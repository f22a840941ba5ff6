"""A plan's layout in one line, for tables."""

from __future__ import annotations

from hetplan.plans.plan import Plan, Stage


def layout_words(plan: Plan) -> str:
    """Degrees in short, as in `tp 4, dp 16, 11 stages, microbatch size 1`."""
    stages, replicas = _stages(plan), plan.replicas

    def some(name: str) -> str:
        return "/".join(dict.fromkeys(str(getattr(each, name)) for each in replicas))

    words = [f"tp {some('tp')}"]
    words += [f"{name} {some(name)}" for name in ("cp", "ep") if some(name) != "1"]
    copies = dict.fromkeys(str(sum(each.dp for each in stage.replicas)) for stage in stages)
    words.append(f"dp {'/'.join(copies)}")
    if len(plan.pipelines) > 1:
        words.append(f"{len(plan.pipelines)} pipelines")
    words.append(f"{'/'.join(dict.fromkeys(str(len(p.stages)) for p in plan.pipelines))} stages")
    words.append(f"microbatch size {some('microbatch_size')}")
    chunks = "/".join(dict.fromkeys(str(p.schedule.virtual_stages) for p in plan.pipelines))
    if chunks != "1":
        words.append(f"{chunks} chunks")
    recompute = "/".join(dict.fromkeys(stage.recompute.granularity.value for stage in stages))
    if recompute != "none":
        words.append(f"recompute {recompute}")
    return ", ".join(words)


def devices_in_use(plan: Plan) -> int:
    """Devices of all stages."""
    return sum(replica.num_devices for replica in plan.replicas)


def _stages(plan: Plan) -> list[Stage]:
    return [stage for pipeline in plan.pipelines for stage in pipeline.stages]
