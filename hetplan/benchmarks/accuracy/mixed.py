"""Which cluster and plan was a run on several kinds of devices?

A row names the kinds and not who ran what; that is in the plans that its authors published
(`sailor/validation/.../plan_config_*.json`, named by the row's `source_ref`): per stage its layers
and, per data-parallel replica, a kind, a number of devices and tp. Replicas of one position make a
pipeline of their own, so that two kinds in one stage are two pipelines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hetplan.benchmarks.accuracy.clusters import NodesOf, cluster_of_nodes
from hetplan.benchmarks.accuracy.devices import device_kind_of
from hetplan.benchmarks.accuracy.plans import RunPlan, checked, job_of, ranges_of, recompute_of
from hetplan.benchmarks.accuracy.rows import RunRow
from hetplan.benchmarks.accuracy.trainers import trainer_of
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import DeviceRange, Replica, Schedule, Stage

_VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    kind: str
    devices: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRun:
    """A run on several kinds as its authors planned it."""

    layers_per_stage: tuple[int, ...]
    replicas: tuple[tuple[_Part, ...], ...]
    """Per stage, one part per data-parallel replica."""


def find_mixed(row: RunRow, folders: Sequence[Path]) -> MixedRun:
    """The published plan of a row, from the first folder that has it; else an InputError."""
    words = PurePosixPath(row.source_ref.split(" ")[-1]).parts
    if _VALIDATION in words:
        inside = Path("sailor", *words[words.index(_VALIDATION) :])
        for folder in folders:
            if (folder / inside).is_file():
                return _read(folder / inside)
    raise InputError(
        f"gpu is {row.gpu!a}; which kind ran what is said by a plan that is not in the folder "
        f"(source_ref {row.source_ref!a})"
    )


def _read(path: Path) -> MixedRun:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        (pipeline,) = data["pipeline_list"]
        return MixedRun(
            layers_per_stage=tuple(len(layers) for layers in pipeline["layers_per_stage"]),
            replicas=tuple(
                tuple(
                    _Part(kind=str(kind), devices=int(count), tp=int(tp))
                    for ((kind, count, *_),), tp in stage
                )
                for stage in pipeline["tmp_per_stage"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(f"{path.name} is no plan of Sailor's: {fault!r}") from fault


def mixed_run(
    row: RunRow, model: ModelSpec, run: MixedRun, measured_links: Sequence[str]
) -> tuple[Cluster, RunPlan]:
    """The cluster and the plan; an InputError where they do not fit the row."""
    job, trainer = job_of(row, target="any"), trainer_of(row)
    cluster, starts = _placed(row, run, measured_links)
    if not row.micro_batch:
        raise InputError("the row does not say micro_batch")
    dp = len(run.replicas[0])
    if any(len(stage) != dp for stage in run.replicas):
        raise InputError("stages with unequal numbers of replicas")
    samples = dp * row.micro_batch
    if job.global_batch_size % samples:
        raise InputError(f"global_batch {job.global_batch_size} is not a multiple of {samples}")
    count, ranges = job.global_batch_size // samples, ranges_of(run.layers_per_stage)
    stages = len(ranges)
    pipelines = [
        assemble_pipeline(
            cluster,
            job,
            [
                Stage(
                    chunks=(ranges[at],),
                    replicas=(
                        Replica(
                            devices=(DeviceRange(start=starts[at][copy], count=part.devices),),
                            tp=part.tp,
                            microbatch_size=row.micro_batch,
                        ),
                    ),
                    recompute=recompute_of(row),
                    warmup_depth=own_depth("1f1b", at, stages, count),
                )
                for at, part in enumerate(stage[copy] for stage in run.replicas)
            ],
            num_microbatches=count,
            schedule=Schedule(name="1f1b"),
        )
        for copy in range(dp)
    ]
    plan = assemble_plan(model, cluster, job, pipelines)
    return cluster, checked(RunPlan(job=job, plan=plan, notes=trainer.notes), model, cluster)


def _placed(
    row: RunRow, run: MixedRun, measured_links: Sequence[str]
) -> tuple[Cluster, list[list[int]]]:
    """An island per kind with as many nodes as its parts need, and every part's first device."""
    catalogue, most = load_catalogue(), row.gpus_per_node or 8
    names = dict.fromkeys(part.kind for stage in run.replicas for part in stage)
    sizes = {
        name: [part.devices for stage in run.replicas for part in stage if part.kind == name]
        for name in names
    }
    parts, firsts, at = [], {}, 0
    for name in names:
        per_node = max(sizes[name])
        if per_node > most or any(size != per_node for size in sizes[name]):
            raise InputError(f"parts of {sizes[name]} devices of {name} do not fill nodes")
        # Parts of one kind stand in nodes of their own: the authors' nodes are of one kind.
        nodes = len(sizes[name])
        kind = device_kind_of(name, catalogue)
        parts.append(NodesOf(kind=kind, nodes=nodes, devices_per_node=per_node))
        firsts[name] = at
        at += nodes * per_node
    starts: list[list[int]] = []
    for stage in run.replicas:
        starts.append([])
        for part in stage:
            starts[-1].append(firsts[part.kind])
            firsts[part.kind] += part.devices
    return cluster_of_nodes(row, parts, measured_links), starts
