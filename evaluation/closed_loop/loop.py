"""The closed loop on emulated hosts: profile, fit, predict, really train, compare.

Everything is measured inside one emulation, by processes that share a control group with more
weight than others have. An interrupted loop resumes in its folder; nothing but that folder is left
behind, also after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from evaluation.closed_loop.cgroup import weighted
from evaluation.closed_loop.measuring import (
    JITTER,
    PLAIN,
    make_paces,
    measure_devices,
    measure_links,
    search_plan,
)
from evaluation.closed_loop.plans import (
    MAX_LENGTH,
    POOL_SIZE,
    SAMPLES,
    SHORT_MAX_LENGTH,
    PoolSpace,
    choose,
    draw_pool,
    loop_plan,
    price_pool,
    profile_excess,
    speeds_of,
)
from evaluation.closed_loop.results import judge
from evaluation.closed_loop.together import train_together
from evaluation.closed_loop.training import TrainingTask, train_missing
from evaluation.closed_loop.values import (
    CLUSTER_FILE,
    JOB_FILE,
    MODEL_FILE,
    SHORT_JOB_FILE,
    ClosedLoop,
    Goals,
    LoopInputs,
    LoopPass,
    LoopPlan,
    LoopPlans,
    LoopRow,
    LoopSpec,
    Say,
    open_folder,
)
from hetplan.cluster.load import load_cluster
from hetplan.cost.step_model.pricer import Pricer
from hetplan.emulation.running import emulated
from hetplan.emulation.tools import require
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.load import load_job
from hetplan.launchers.run_log import this_machine
from hetplan.model.load import load_model
from hetplan.plans.ranks import launch_faults
from hetplan.predict.fit import load_predictor
from hetplan.profiling.pacing import load_pace
from hetplan.search.files import load_legal_plan

PLANS_SCHEMA = "hetplan.closed-loop-plans/1"
BEST_PLANS = 5
"""Best predicted plans that are trained, where at least twice as many plans are."""
STALLED_PLANS = 8
"""Plans with a quarter of their step in bubble or exposed communication, of twenty."""


def closed_loop(spec: LoopSpec, folder: Path, *, say: Say) -> ClosedLoop:
    """Run the loop, or what is missing of it in this folder.

    InputError where the machine cannot emulate hosts, or the folder has another loop; LaunchError
    where a plan cannot be trained.
    """
    require()
    open_folder(folder, spec)
    cluster, machine = load_cluster(CLUSTER_FILE), this_machine()
    with weighted() as weight:
        if weight:
            say(f"the loop's processes have no more weight than others: {weight}")
        with emulated(cluster, name=f"closed-loop-{os.getpid()}") as emulation:
            inputs = LoopInputs(
                spec=spec,
                folder=folder,
                emulation=emulation,
                model=load_model(MODEL_FILE),
                cluster=cluster,
                job=load_job(SHORT_JOB_FILE if spec.short else JOB_FILE),
                say=say,
            )
            make_paces(inputs)
            measure_links(inputs)
            measure_devices(inputs, PLAIN)
            plans = _plans(inputs)
            kinds = (PLAIN, JITTER) if spec.jitter else (PLAIN,)
            passes = tuple(_pass(inputs, plans, kind) for kind in kinds)
            hethub = train_together(inputs) if spec.hethub else None
    return ClosedLoop(
        machine=(
            f"{machine.processor}, {machine.cores} cores, {machine.system}, Python "
            f"{machine.python_version}, torch {machine.torch_version}"
        ),
        spec=spec,
        weight=weight,
        passes=passes,
        hethub=hethub,
        pool=plans.pool,
        left_out_slow=plans.left_out_slow,
    )


def _pricer(inputs: LoopInputs, kind: str) -> Pricer:
    predictor = load_predictor(inputs.predictor(kind))
    return Pricer(inputs.model, inputs.cluster, inputs.job, predictor)


def _plans(inputs: LoopInputs) -> LoopPlans:
    """The plans of the loop, chosen before anything is trained."""
    file, spec = inputs.path("plans.json"), inputs.spec
    if file.exists():
        return decode(read_document(file), LoopPlans, schema=PLANS_SCHEMA)
    search_plan(inputs, inputs.job_file, inputs.path("searched.json"))
    pricer = _pricer(inputs, PLAIN)
    plan = load_legal_plan(inputs.path("searched.json")).plan
    faults = tuple(launch_faults(plan))
    if faults:
        raise InputError(*faults)
    space = PoolSpace(
        model=inputs.model,
        cluster=inputs.cluster,
        job=inputs.job,
        speeds=speeds_of(pricer),
        samples=(2,) if spec.short else SAMPLES,
    )
    plans = choose(
        price_pool(pricer, draw_pool(space, seed=spec.seed, size=POOL_SIZE)),
        loop_plan(pricer, plan, searched=True),
        plans=spec.plans,
        best=min(BEST_PLANS, spec.plans // 2),
        stalled=STALLED_PLANS * spec.plans // 20,
        longest=SHORT_MAX_LENGTH if spec.short else MAX_LENGTH,
        seed=spec.seed,
    )
    write_atomically(file, encode(plans, schema=PLANS_SCHEMA))
    return plans


def _pass(inputs: LoopInputs, plans: LoopPlans, kind: str) -> LoopPass:
    """All plans trained once at a pace, the searched one several times."""
    spec = inputs.spec
    measure_devices(inputs, kind)
    pricer = _pricer(inputs, kind)
    priced = [loop_plan(pricer, each.plan, searched=each.searched) for each in plans.plans]
    order = training_order(priced, spec.repeats)
    trained = train_missing(
        inputs,
        kind,
        kind,
        [TrainingTask(name=name, plan=plan, job=inputs.job) for name, plan in order],
        warmup_steps=spec.warmup_steps,
        steps=spec.steps,
    )
    by_name = dict(zip([name for name, _ in order], trained, strict=True))
    rows = [
        LoopRow(
            name=plan.name,
            form=plan.form,
            searched=plan.searched,
            stalled=plan.stalled,
            trained=by_name[str(number)],
        )
        for number, plan in enumerate(priced)
    ]
    return judge(
        rows,
        [run for (_, plan), run in zip(order, trained, strict=True) if plan.searched],
        jitter=spec.jitter if kind == JITTER else 0.0,
        goals=Goals.of(spec),
        profile_excess=profile_excess(pricer, load_pace(inputs.pace(kind))),
    )


def training_order(plans: Sequence[LoopPlan], repeats: int) -> list[tuple[str, LoopPlan]]:
    """(name of the training, plan) in the order in which they are trained.

    Trainings of the searched plan beyond its own are spread evenly over the others, the last one
    at the end, so that what changes on the machine meanwhile shows in their spread.
    """
    searched = next(plan for plan in plans if plan.searched)
    order: list[tuple[str, LoopPlan]] = []
    for number, plan in enumerate(plans):
        order.append((str(number), plan))
        order += [
            (f"repeat-{repeat}", searched)
            for repeat in range(1, repeats)
            if number + 1 == round(repeat * len(plans) / (repeats - 1))
        ]
    return order
