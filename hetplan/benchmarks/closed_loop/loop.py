"""Does the closed loop hold: profile, fit, predict, really train, compare, on emulated hosts?

Everything measured is measured inside one emulation, by processes that share a control group with
more weight than others have. `closed_loop` goes on where an interrupted loop in the same folder
ended; nothing but that folder is left behind, also after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetplan.benchmarks.closed_loop import measuring
from hetplan.benchmarks.closed_loop.asked import Asked, ToTrain, train_missing
from hetplan.benchmarks.closed_loop.choosing import (
    MAX_LENGTH,
    POOL,
    SHORT_MAX_LENGTH,
    choose,
    loop_plan,
    price_pool,
    profile_excess,
    speeds_of,
)
from hetplan.benchmarks.closed_loop.files import open_folder
from hetplan.benchmarks.closed_loop.judging import judge
from hetplan.benchmarks.closed_loop.measuring import JITTER, PLAIN, Say
from hetplan.benchmarks.closed_loop.pool import SAMPLES, draw_pool
from hetplan.benchmarks.closed_loop.values import (
    PLANS_SCHEMA,
    ClosedLoop,
    Goals,
    LoopPass,
    LoopPlan,
    LoopPlans,
    LoopRow,
    LoopSpec,
)
from hetplan.benchmarks.closed_loop.weight import weighted
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.priced.pricer import Pricer
from hetplan.emulation.pace import least_headroom, slow_downs
from hetplan.emulation.running import emulated
from hetplan.emulation.tools import require
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.launchers.machine import this_machine
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
STALLED_PLANS = 8
"""With a quarter of their step in bubble or exposed communication, of twenty."""


def closed_loop(spec: LoopSpec, folder: Path, *, say: Say) -> ClosedLoop:
    """Run the loop, or what is missing of it in this folder.

    InputError where the machine cannot emulate hosts, or the folder has another loop; LaunchError
    where a plan cannot be trained.
    """
    require()
    files = open_folder(folder, spec)
    asked = Asked(
        files=files,
        spec=spec,
        model=load_model(files.model),
        cluster=load_cluster(files.cluster),
        job=load_job(files.job),
        say=say,
    )
    machine = this_machine()
    passes = []
    hethub = None
    with weighted() as weight:
        if weight:
            say(f"the loop's processes have no more weight than others: {weight}")
        with emulated(asked.cluster, name=f"closed-loop-{os.getpid()}") as emulation:
            measuring.make_paces(
                files,
                emulation,
                headroom=_headroom(asked.cluster, asked.job),
                jitter=spec.jitter,
                seed=spec.seed,
                say=say,
            )
            measuring.measure_links(files, emulation, asked.cluster, say=say)
            plans = _plans(asked, emulation)
            for kind in (PLAIN, JITTER) if spec.jitter else (PLAIN,):
                passes.append(_pass(asked, emulation, plans, kind))
            if spec.hethub:
                from hetplan.benchmarks.closed_loop.together import train_together

                hethub = train_together(asked, emulation)
    return ClosedLoop(
        machine=(
            f"{machine.processor}, {machine.cores} cores, {machine.system}, Python "
            f"{machine.python_version}, torch {machine.torch_version}"
        ),
        spec=spec,
        weight=weight,
        passes=tuple(passes),
        hethub=hethub,
        pool=plans.pool,
        left_out_slow=plans.left_out_slow,
    )


def _headroom(cluster: Cluster, job: Job) -> float:
    factors = slow_downs(cluster, job.precision.value, {})
    return MORE_HEADROOM * least_headroom(cluster, factors, os.cpu_count() or 1)


def _plans(asked: Asked, emulation: Emulation) -> LoopPlans:
    """The plans of the loop; chosen when its devices were measured, before anything is trained."""
    files, spec, job = asked.files, asked.spec, asked.job
    measuring.measure_devices(files, emulation, PLAIN, asked.say)
    measuring.fit(files, emulation, PLAIN, asked.say)
    if files.plans.exists():
        return decode(read_document(files.plans), LoopPlans, schema=PLANS_SCHEMA)
    measuring.plan(files, emulation, PLAIN, files.job, files.searched, asked.say)
    predictor = load_predictor(files.predictor(PLAIN))
    pricer = Pricer(asked.model, asked.cluster, job, predictor)
    result = load_plan(files.searched)
    faults = tuple(launch_faults(result.plan))
    if faults:
        raise InputError(*faults)
    searched = loop_plan(pricer, result.plan, asked.cluster, asked.model, searched=True)
    pool = draw_pool(
        asked.model,
        asked.cluster,
        job,
        speeds=speeds_of(asked.model, asked.cluster, job, predictor),
        seed=spec.seed,
        size=POOL,
        samples=(2,) if spec.short else SAMPLES,
    )
    found = choose(
        price_pool(pricer, pool, asked.cluster, asked.model),
        searched,
        plans=spec.plans,
        best=min(BEST_PLANS, spec.plans // 2),
        stalled=STALLED_PLANS * spec.plans // 20,
        longest=SHORT_MAX_LENGTH if spec.short else MAX_LENGTH,
        seed=spec.seed,
    )
    write_atomically(files.plans, encode(found, schema=PLANS_SCHEMA))
    return found


def _pass(asked: Asked, emulation: Emulation, plans: LoopPlans, kind: str) -> LoopPass:
    """All plans trained once at a pace, the searched one as often as asked."""
    files, spec = asked.files, asked.spec
    measuring.measure_devices(files, emulation, kind, asked.say)
    measuring.fit(files, emulation, kind, asked.say)
    pricer = Pricer(asked.model, asked.cluster, asked.job, load_predictor(files.predictor(kind)))
    priced = [
        loop_plan(pricer, each.plan, asked.cluster, asked.model, searched=each.searched)
        for each in plans.plans
    ]
    order = training_order(priced, spec.repeats)
    trained = train_missing(
        asked,
        emulation,
        kind,
        kind,
        [ToTrain(name=name, plan=plan, job=asked.job) for name, plan in order],
        warmup_steps=spec.warmup_steps,
        steps=spec.steps,
    )
    by_name = dict(zip([name for name, _ in order], trained, strict=True))
    rows = [
        LoopRow(
            name=each.name,
            form=each.form,
            searched=each.searched,
            stalled=each.stalled,
            trained=by_name[str(number)],
        )
        for number, each in enumerate(priced)
    ]
    repeats = [one for (name, plan), one in zip(order, trained, strict=True) if plan.searched]
    return judge(
        rows,
        repeats,
        jitter=spec.jitter if kind == JITTER else 0.0,
        goals=Goals.of(spec),
        profile_excess=profile_excess(
            asked.model, asked.cluster, asked.job, pricer.predictor, load_pace(files.pace(kind))
        ),
    )


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
                found.append((f"repeat-{repeat}", searched))
    return found
