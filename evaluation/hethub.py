"""One plan over unlike accelerators against the sum of its kinds alone: HETHUB's question.

HETHUB (arXiv 2405.16256) trained Llama-140B on 128 + 640 accelerators, and six pairs of kinds, and
measured up to 97.49 % of a "theoretical upper bound" that it does not define in what could be read.
Here every figure is predicted, and two ratios are defined:

    homogeneous_sum_ratio   tokens/s of the plan / sum over its kinds of the best tokens/s of that
                            kind alone: same model, global batch, sequence and target, gap <= 1 %
    roofline_ratio          tokens/s of the plan / sum over devices of peak rate / operations per
                            token

Neither is a bound on a plan (`hetplan.whatif.baselines`). Where a ratio is below 1 the loss is
named: devices left idle, and the part of the step in which the others are not busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas

from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.deadline import ends_by, moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.files.shipped import default_stores, shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.units import format_seconds, format_share
from hetplan.whatif.baselines import homogeneous_sum
from hetplan.whatif.smaller_questions import Answers

TARGETS = ("megatron", "flagscale", "torchtitan", "native")
_FIGURES = (
    *("step_seconds", "tokens_per_second", "gap", "homogeneous_sum_ratio", "roofline_ratio"),
    *("idle_fraction", "busy_fraction"),
)
MEASURED_BY_HETHUB = 0.9749
"""Best of its six combinations, measured (arXiv 2405.16256, abstract); another definition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One experiment: a model on accelerators of two kinds."""

    name: str
    model: ModelSpec
    cluster: Cluster
    job: Job


Row = dict[str, Any]
"""One experiment under one target; all times and rates predicted.

`plan_cpu_seconds`: of the search of the mix, without its kinds alone. `reason`: empty, or why there
is no plan, whose figures are missing then. `gap`: proven distance to the best plan of the target.
`kinds_alone`: tokens/s of each kind alone, in the order of `kinds`; its roofline where it has no
plan. `idle_fraction`: devices that the plan leaves unused. `busy_fraction`: part of the used
devices' step in forward and backward passes.
"""


def hethub_rows(
    mixes: Sequence[Mix],
    targets: Sequence[str] = TARGETS,
    *,
    predictor: Predictor | None = None,
    time_limit_seconds: float | None = None,
    progress: Callable[[str], None],
) -> list[Row]:
    """Plan every mix for every target, and each kind alone.

    `time_limit_seconds` is for each search, instead of the job's.
    """
    if predictor is None:
        predictor = with_shipped(fit_stores(*default_stores())[0])
    rows = []
    for mix in mixes:
        for target in targets:
            progress(f"{mix.name} for {target}")
            rows.append(_row(mix, target, predictor, time_limit_seconds))
    return rows


def shipped_mixes() -> tuple[Mix, ...]:
    """Llama-140B on 768 accelerators, and every pair of the four kinds, from configs/."""
    configs = shipped_folder("configs")
    return (
        Mix(
            name="llama-140b on 128 + 640",
            model=load_model(configs / "models" / "llama-140b.yaml"),
            cluster=load_cluster(configs / "clusters" / "mixed-768.yaml"),
            job=load_job(configs / "jobs" / "llama-140b.yaml"),
        ),
        *_pairs(configs),
    )


def _pairs(configs: Path) -> Iterator[Mix]:
    model = load_model(configs / "models" / "llama-2-70b.yaml")
    cluster = load_cluster(configs / "clusters" / "four-vendors.yaml")
    job = load_job(configs / "jobs" / "llama-2-70b.yaml")
    names = [island.name for island in cluster.islands]
    for pair in combinations(names, 2):
        others = tuple(name for name in names if name not in pair)
        forbid = replace(job.forbid, islands=(*job.forbid.islands, *others))
        yield Mix(
            name=f"{model.name} on {' + '.join(pair)}",
            model=model,
            cluster=cluster,
            job=replace(job, forbid=forbid),
        )


def _row(mix: Mix, target: str, predictor: Predictor, limit: float | None) -> Row:
    # HETHUB's trainer is a patched Megatron-LM; stock ones cannot mix makers' libraries.
    patched = replace(mix.job.trainer, mixed_libraries=True)
    job = replace(mix.job, target=target, trainer=patched)
    if limit is not None:
        job = replace(job, time_limit_seconds=limit)
    islands = [
        island for island in mix.cluster.islands if island.name not in mix.job.forbid.islands
    ]
    started = time.process_time()
    found: SearchResult | None = None
    reason = ""
    try:
        found = search(mix.model, mix.cluster, job, predictor)
    except (InfeasibleError, InputError, LimitError) as error:
        reason = str(error).splitlines()[0]
    kinds = tuple(dict.fromkeys(island.device.kind for island in islands))
    row: Row = {
        "mix": mix.name,
        "devices": sum(len(island.usable_nodes) * island.devices_per_node for island in islands),
        "kinds": kinds,
        "global_batch_size": job.global_batch_size,
        "target": target,
        "plan_cpu_seconds": time.process_time() - started,
        "reason": reason,
        **dict.fromkeys(_FIGURES),
    }
    if found is None:
        return row
    limit = math.inf if job.time_limit_seconds is None else job.time_limit_seconds
    # Each kind alone has the limit that the mix had.
    with ends_by(moment_in(len(kinds) * limit)):
        figure = homogeneous_sum(found, Answers(predictor))
    alone = {each.device: each for each in figure.kinds}
    devices = [
        sum(replica.num_devices for replica in stage.replicas)
        for pipeline in found.plan.pipelines
        for stage in pipeline.stages
    ]
    step, used = found.estimate.step_seconds, sum(devices)
    stages = zip(devices, found.estimate.stages, strict=True)
    busy = sum(count * stage.busy_seconds for count, stage in stages)
    return row | {
        "step_seconds": step,
        "tokens_per_second": found.estimate.tokens_per_second,
        "gap": 1.0 if found.certificate is None else found.certificate.gap,
        "homogeneous_sum_ratio": figure.homogeneous_sum_ratio,
        "roofline_ratio": figure.roofline_ratio,
        "kinds_alone": tuple(
            alone[kind].tokens_per_second or alone[kind].roofline_tokens_per_second or 0.0
            for kind in kinds
        ),
        "idle_fraction": 1.0 - used / row["devices"],
        "busy_fraction": busy / (step * used),
    }


def hethub_answer(rows: Sequence[Row]) -> Answer:
    """One row per mix and target, what the columns are, and why HETHUB's figure is not one."""
    percent = "{:.1%}"
    table = Section(
        name="rows",
        title="One plan over two kinds against its kinds alone, all predicted",
        frame=pandas.DataFrame(rows),
        columns={
            "mix": ("mix", WORDS),
            "target": ("target", WORDS),
            "step": ("step_seconds", format_seconds),
            "gap": ("gap", percent),
            "homogeneous_sum_ratio": ("homogeneous_sum_ratio", format_share),
            "roofline_ratio": ("roofline_ratio", format_share),
            "idle": ("idle_fraction", percent),
            "busy": ("busy_fraction", percent),
            "tokens/s": ("tokens_per_second", "{:,.0f}"),
            "CPU": ("plan_cpu_seconds", "{:.1f} s"),
        },
    )
    lines = [
        "megatron and torchtitan are patched ones here (trainer.mixed_libraries)",
        "a kind that cannot hold the model alone counts with its roofline; busy: part of the step "
        "in which the others compute; CPU: of the mix's search alone",
        f"HETHUB (arXiv 2405.16256) reports {MEASURED_BY_HETHUB:.2%} of its own upper bound: "
        "measured on accelerators and defined otherwise, so it is not to be set beside these "
        "predicted ratios",
    ]
    lines += ["{mix} for {target}: {reason}".format(**row) for row in rows if row["reason"]]
    return Answer(
        sections=(table,), lines=tuple(lines), values={"measured_by_hethub": MEASURED_BY_HETHUB}
    )
