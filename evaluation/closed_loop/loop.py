"""The closed loop on emulated hosts: profile, fit, plan, really train, compare.

Everything measured is measured inside one emulation. `closed_loop` goes on where an interrupted
loop in the same folder ended; nothing but that folder is left behind, also after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas

from evaluation.closed_loop import training
from evaluation.closed_loop.plans import (
    MAX_LENGTH,
    POOL_SIZE,
    SAMPLES,
    SHORT_MAX_LENGTH,
    choose,
    draw_pool,
    loop_plan,
    price_pool,
    profile_excess,
    speeds_of,
)
from evaluation.closed_loop.training import LoopInputs, Say, train_missing
from evaluation.closed_loop.values import (
    MAX_OVERRUN,
    MAX_PROFILE_EXCESS,
    MAX_SPREAD,
    PLANS_SCHEMA,
    ClosedLoop,
    Goals,
    LoopPlan,
    LoopPlans,
    LoopSpec,
    LoopTotals,
    TrainedPlan,
    Verdict,
    open_folder,
)
from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.pricer import Pricer
from hetplan.emulation.pace import least_headroom, slow_downs
from hetplan.emulation.running import emulated
from hetplan.emulation.tools import require
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.launchers.run_log import this_machine
from hetplan.model.load import load_model
from hetplan.plans.ranks import launch_faults
from hetplan.predict.fit import load_predictor
from hetplan.profiling.pacing import load_pace
from hetplan.search.files import load_plan

BEST_PLANS = 5
"""Of the pool's best predicted ones that are trained, where at least twice as many plans are."""
MORE_HEADROOM = 1.5
"""Times the least headroom of `hetplan emulate pace`: with sends that do not wait hosts compute
nearly all of the time, and one that is late makes the others late."""


def closed_loop(spec: LoopSpec, folder: Path, *, say: Say) -> ClosedLoop:
    """Run the loop, or what is missing of it in this folder.

    InputError where the machine cannot emulate hosts, or the folder has another loop; LaunchError
    where a plan cannot be trained.
    """
    require()
    files = open_folder(folder, spec)
    model, cluster, job = load_model(files.model), load_cluster(files.cluster), load_job(files.job)
    inputs = LoopInputs(files=files, spec=spec, model=model, cluster=cluster, job=job, say=say)
    with emulated(cluster, name=f"closed-loop-{os.getpid()}") as emulation:
        training.measure(inputs, emulation, headroom=_headroom(cluster, job))
        if not files.searched.exists():
            training.search_plan(inputs, emulation)
        plans = _plans(inputs)
        order = training_order(plans.plans, spec.repeats)
        trained = train_missing(inputs, emulation, order)
    pairs = list(zip(order, trained, strict=True))
    repeats = tuple(done for (_, plan), done in pairs if plan.searched)
    first = tuple(done for (name, _), done in pairs if not name.startswith(_REPEAT))
    predictor = load_predictor(files.predictor)
    excess = profile_excess(model, cluster, job, predictor, load_pace(files.pace))
    found = totals(plans.plans, first, repeats)
    verdict, reasons = verdict_of(found, Goals.of(spec), excess)
    machine = this_machine()
    return ClosedLoop(
        machine=(
            f"{machine.processor}, {machine.cores} cores, {machine.system}, Python "
            f"{machine.python_version}, torch {machine.torch_version}"
        ),
        spec=spec,
        plans=plans,
        trained=first,
        repeats=repeats,
        totals=found,
        profile_excess=excess,
        verdict=verdict,
        reasons=reasons,
    )


def _headroom(cluster: Cluster, job: Job) -> float:
    factors = slow_downs(cluster, job.precision.value, {})
    return MORE_HEADROOM * least_headroom(cluster, factors, os.cpu_count() or 1)


def _plans(inputs: LoopInputs) -> LoopPlans:
    """The plans of the loop; chosen when its devices were measured, before anything is trained."""
    files, spec, job = inputs.files, inputs.spec, inputs.job
    model, cluster = inputs.model, inputs.cluster
    if files.plans.exists():
        return decode(read_document(files.plans), LoopPlans, schema=PLANS_SCHEMA)
    predictor = load_predictor(files.predictor)
    pricer = Pricer(model, cluster, job, predictor)
    result = load_plan(files.searched)
    faults = tuple(launch_faults(result.plan))
    if faults:
        raise InputError(*faults)
    searched = loop_plan(pricer, result.plan, cluster, model, searched=True)
    pool = draw_pool(
        model,
        cluster,
        job,
        speeds=speeds_of(model, cluster, job, predictor),
        seed=spec.seed,
        size=POOL_SIZE,
        samples=(2,) if spec.short else SAMPLES,
    )
    found = choose(
        price_pool(pricer, pool, cluster, model),
        searched,
        plans=spec.plans,
        best=min(BEST_PLANS, spec.plans // 2),
        longest=SHORT_MAX_LENGTH if spec.short else MAX_LENGTH,
    )
    write_atomically(files.plans, encode(found, schema=PLANS_SCHEMA))
    return found


_REPEAT = "repeat-"


def training_order(plans: Sequence[LoopPlan], repeats: int) -> list[tuple[str, LoopPlan]]:
    """(name of the training, plan) in the order in which they are trained.

    Trainings of the searched plan beyond its own are spread evenly over the others, the last one
    at the end, so that what changes on the machine meanwhile shows in their spread.
    """
    searched = next(plan for plan in plans if plan.searched)
    order = [(str(number), plan) for number, plan in enumerate(plans)]
    found = []
    for at, entry in enumerate(order, start=1):
        found.append(entry)
        for repeat in range(1, repeats):
            if at == round(repeat * len(order) / (repeats - 1)):
                found.append((f"{_REPEAT}{repeat}", searched))
    return found


def totals(
    plans: Sequence[LoopPlan], trained: Sequence[TrainedPlan], repeats: Sequence[TrainedPlan]
) -> LoopTotals:
    """The numbers of at least one plan; `repeats` are all trainings of the searched one."""
    rows = trained_frame(plans, trained)
    measured = rows["measured_seconds"]
    searched = float(measured[rows["searched"]].iloc[0])
    everything = (*trained, *repeats)
    passes = sum(each.paced_passes for each in everything)
    correlation = float(rows["predicted_seconds"].rank().corr(measured.rank()))
    return LoopTotals(
        mape=float(rows["error"].abs().mean()),
        worst=float(rows["error"].abs().max()),
        bias=float(rows["error"].mean()),
        spearman=1.0 if pandas.isna(correlation) else correlation,
        regret=searched / float(measured.min()) - 1.0,
        repeats_spread=_spread([each.measured_seconds for each in repeats]),
        overrun=sum(each.overruns for each in everything) / passes if passes else 0.0,
        range=float(measured.max() / measured.min()),
        load_average=max(each.load_average for each in everything),
    )


def trained_frame(plans: Sequence[LoopPlan], trained: Sequence[TrainedPlan]) -> pandas.DataFrame:
    """A row per plan, predicted and measured, by predicted step."""
    rows = [
        {
            **asdict(one),
            "form": plan.form,
            "searched": plan.searched,
            "error": one.error,
            "spread": _spread(one.step_seconds),
            "overrun": one.overrun,
        }
        for plan, one in zip(plans, trained, strict=True)
    ]
    return pandas.DataFrame(rows).sort_values("predicted_seconds", ignore_index=True)


def _spread(seconds: Sequence[float]) -> float:
    """(longest - shortest) / shortest; 0 of a single one."""
    return max(seconds) / min(seconds) - 1.0


def verdict_of(
    found: LoopTotals, goals: Goals, profile_excess: float = 0.0
) -> tuple[Verdict, tuple[str, ...]]:
    """What the numbers say, and why."""
    reasons = tuple(_invalid(found, profile_excess))
    if reasons:
        return Verdict.INVALID, reasons
    reasons = tuple(_missed(found, goals))
    return (Verdict.MISSED if reasons else Verdict.REACHED), reasons


def _invalid(found: LoopTotals, profile_excess: float) -> Iterator[str]:
    """Why measurements say nothing of predictions; none where they do."""
    busy = f"load average up to {found.load_average:.1f}"
    if found.overrun > MAX_OVERRUN:
        yield (
            f"{found.overrun:.0%} of the paced passes took longer than their pace (at most "
            f"{MAX_OVERRUN:.0%}): the cores were too busy ({busy})"
        )
    if found.repeats_spread > MAX_SPREAD:
        yield (
            f"trainings of one plan differ by {found.repeats_spread:.1%} (at most "
            f"{MAX_SPREAD:.0%}): the machine was not the same all the time ({busy})"
        )
    if profile_excess > MAX_PROFILE_EXCESS:
        yield (
            f"a device kind was profiled {profile_excess:.1%} above its pace (at most "
            f"{MAX_PROFILE_EXCESS:.0%}): the machine was busy then; remove the folder and profile "
            "again"
        )


def _missed(found: LoopTotals, goals: Goals) -> Iterator[str]:
    if found.mape > goals.mape:
        yield f"MAPE {found.mape:.1%}; the goal is {goals.mape:.0%}"
    if found.spearman < goals.spearman:
        yield f"Spearman {found.spearman:.3f}; the goal is {goals.spearman:g}"
    if found.regret > goals.regret:
        yield f"regret {found.regret:.1%}; the goal is {goals.regret:.0%}"


def loop_answer(found: ClosedLoop) -> Answer:
    """The plans, the totals with their verdict, and what the columns are."""
    rows = trained_frame(found.plans.plans, found.trained)
    rows["plan"] = rows["name"].where(~rows["searched"], rows["name"] + " *")
    whole = pandas.DataFrame(
        [
            {
                "plans": len(rows),
                **asdict(found.totals),
                "verdict": found.verdict.value,
                "reasons": "; ".join(found.reasons),
            }
        ]
    )
    spec, percent, seconds = found.spec, "{:.1%}", "{:.3f} s"
    return Answer(
        sections=(
            Section(
                name="rows",
                title="Predicted and trained",
                frame=rows,
                columns={
                    "plan": ("plan", WORDS),
                    "form": ("form", WORDS),
                    "predicted": ("predicted_seconds", seconds),
                    "measured": ("measured_seconds", seconds),
                    "error": ("error", "{:+.1%}"),
                    "steps differ by": ("spread", percent),
                    "overrun": ("overrun", "{:.0%}"),
                },
            ),
            Section(
                name="totals",
                title="All plans",
                frame=whole,
                columns={
                    "plans": ("plans", "{:d}"),
                    "MAPE": ("mape", "{:.2%}"),
                    "worst": ("worst", percent),
                    "mean error": ("bias", "{:+.1%}"),
                    "Spearman": ("spearman", "{:.3f}"),
                    "regret": ("regret", "{:.2%}"),
                    "repeats differ by": ("repeats_spread", percent),
                    "overrun": ("overrun", percent),
                    "longest / shortest": ("range", "{:.2f}"),
                    "load": ("load_average", "{:.1f}"),
                    "verdict": ("verdict", WORDS),
                    "why": ("reasons", WORDS),
                },
            ),
        ),
        lines=(
            f"* the plan that `hetplan plan` found, trained {spec.repeats} times. Plans were "
            f"chosen by predicted rank, seed {spec.seed}, from {found.plans.pool} legal ones, of "
            f"which {found.plans.left_out_slow} were left out because they would take many times "
            "the best",
            f"measured: median of {spec.steps} steps after {spec.warmup_steps} of warm-up. "
            "overrun: paced passes that took longer than their pace",
            found.machine,
        ),
        values={
            "machine": found.machine,
            "spec": found.spec,
            "repeats": found.repeats,
            "profile_excess": found.profile_excess,
            "pool": found.plans.pool,
            "left_out_slow": found.plans.left_out_slow,
        },
    )
