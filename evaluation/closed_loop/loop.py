"""The closed loop on emulated hosts: profile, fit, plan, really train, compare.

Everything measured is measured inside one emulation. `closed_loop` goes on where an interrupted
loop in the same folder ended; nothing but that folder is left behind, also after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
from evaluation.closed_loop.results import totals, verdict_of
from evaluation.closed_loop.training import LoopInputs, Say, train_missing
from evaluation.closed_loop.values import (
    PLANS_SCHEMA,
    ClosedLoop,
    Goals,
    LoopPlan,
    LoopPlans,
    LoopSpec,
    open_folder,
)
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
