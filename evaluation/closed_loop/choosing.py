"""Which plans does the loop train? Chosen by a seed and by predictions, before anything is trained.

The best ones of the pool, the plan that the search found, and from each of equally many strata of
predicted rank one, of the form that was taken least so far. Where fewer than the wanted number
stall (bubble or exposed communication) for a quarter of their step, others of their strata that do
take their places. Plans that are predicted to take many times longer than the best are left out of
the pool, for the time that they would take.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from evaluation.closed_loop.pool import Drawn, form_of, name_of
from evaluation.closed_loop.values import LoopPlan, LoopPlans
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Component
from hetplan.cost.priced.break_down import break_down
from hetplan.cost.priced.draws import straggler_wait
from hetplan.cost.priced.pricer import Pricer
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import Phase

POOL = 600
"""Plans that are drawn; two seconds to price."""
STALLED = frozenset(
    {
        Component.BUBBLE,
        Component.PIPELINE,
        Component.DATA_PARALLEL,
        Component.GATHERING,
        Component.EMBEDDING,
        Component.NORM,
        Component.OTHER_STAGES,
        Component.TENSOR_PARALLEL,
    }
)
"""What of a step's critical path is not compute or update."""
MUCH_STALLED = 0.25
"""Part of a step, from which a plan counts as one that tests more than compute."""
MAX_LENGTH, SHORT_MAX_LENGTH = 4.0, 2.5
"""Times the best predicted step."""


def speeds_of(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> dict[str, float]:
    """Transformer layers a second of a host of each island, forward and backward."""
    found = {}
    for island in cluster.islands:
        seconds = sum(
            predict(
                island.device,
                model,
                LayerKind.TRANSFORMER,
                microbatch_size=2,
                sequence_length=job.sequence_length,
                tp=1,
                precision=job.precision,
            ).seconds
            for predict in (predictor.forward, predictor.backward)
        )
        found[island.name] = 1.0 / seconds
    return found


def profile_excess(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor, pace: Pace
) -> float:
    """Mean by which profiled passes of transformer layers lie above their pace; the worst kind."""
    worst = 0.0
    for device in {island.device.kind: island.device for island in cluster.islands}.values():
        excess = []
        for entry in pace.kind(device.kind).entries:
            if entry.layer == LayerKind.TRANSFORMER:
                forward = entry.phase == Phase.FORWARD
                predict = predictor.forward if forward else predictor.backward
                found = predict(
                    device,
                    model,
                    LayerKind.TRANSFORMER,
                    microbatch_size=entry.microbatch_size,
                    sequence_length=job.sequence_length,
                    tp=entry.tp,
                    precision=job.precision,
                )
                excess.append(found.seconds / entry.seconds - 1.0)
        worst = max(worst, sum(excess) / len(excess))
    return worst


def loop_plan(
    pricer: Pricer, plan: Plan, cluster: Cluster, model: ModelSpec, *, searched: bool = False
) -> LoopPlan:
    """A plan with its price: that of `hetplan.cost.estimate`, without the interval."""
    step, costs = pricer.step(plan), pricer.costs(plan)
    waiting = straggler_wait(plan, costs, step)
    seconds = step.step_seconds + waiting
    parts = break_down(plan, costs, step, waiting).critical
    return LoopPlan(
        name=name_of(plan, cluster, model),
        form=form_of(plan),
        plan=plan,
        predicted_seconds=seconds,
        stalled=sum(each.seconds for each in parts if each.component in STALLED) / seconds,
        searched=searched,
    )


def price_pool(
    pricer: Pricer, pool: Sequence[Drawn], cluster: Cluster, model: ModelSpec
) -> tuple[LoopPlan, ...]:
    """Those of the pool that can be priced, fastest first."""
    priced = []
    for drawn in pool:
        try:
            priced.append(loop_plan(pricer, drawn.plan, cluster, model))
        except InputError:
            # Warm-up depths whose sends would wait for each other for ever.
            continue
    return tuple(sorted(priced, key=lambda each: (each.predicted_seconds, each.name)))


def choose(
    pool: Sequence[LoopPlan],
    searched: LoopPlan,
    *,
    plans: int,
    best: int,
    stalled: int,
    longest: float,
    seed: int,
) -> LoopPlans:
    """`plans` of the pool, fastest first in it, the searched one among them.

    `best`: how many of the best predicted ones. `stalled`: how many at least have a quarter of
    their step in bubble or exposed communication, where the pool has so many. `longest`: times the
    best predicted step that a plan may take.
    """
    others = [each for each in pool if each.name != searched.name]
    fastest = min(searched.predicted_seconds, others[0].predicted_seconds)
    kept = [each for each in others if each.predicted_seconds <= longest * fastest]
    # The searched plan is one of the best ones, unless the pool has as many that are better.
    better = sum(each.predicted_seconds < searched.predicted_seconds for each in kept)
    number = min(len(kept), best - (1 if better < best else 0), plans - 1)
    taken, rest = kept[:number], kept[number:]
    strata = _strata(rest, plans - 1 - number)
    chance = random.Random(f"choice {seed}")
    forms = Counter(each.form for each in (searched, *taken))
    chosen: list[LoopPlan] = []
    for stratum in strata:
        chosen.append(_pick(stratum, forms, chance))
        forms[chosen[-1].form] += 1
    much = sum(_much(each) for each in (searched, *taken, *chosen))
    # From the slowest stratum on: slow plans are the ones that stall.
    for at in reversed(range(len(strata))):
        if much >= stalled:
            break
        able = [each for each in strata[at] if _much(each)]
        if able and not _much(chosen[at]):
            forms[chosen[at].form] -= 1
            chosen[at] = _pick(able, forms, chance)
            forms[chosen[at].form] += 1
            much += 1
    found = sorted((searched, *taken, *chosen), key=lambda each: each.predicted_seconds)
    return LoopPlans(plans=tuple(found), pool=len(pool), left_out_slow=len(others) - len(kept))


def _strata(rest: Sequence[LoopPlan], count: int) -> list[Sequence[LoopPlan]]:
    """Equal runs of predicted rank, none empty."""
    count = min(count, len(rest))
    return [rest[at * len(rest) // count : (at + 1) * len(rest) // count] for at in range(count)]


def _pick(stratum: Sequence[LoopPlan], forms: Mapping[str, int], chance: random.Random) -> LoopPlan:
    """One of the stratum, of a form that was taken least."""
    least = min(forms[each.form] for each in stratum)
    return chance.choice([each for each in stratum if forms[each.form] == least])


def _much(each: LoopPlan) -> bool:
    return each.stalled >= MUCH_STALLED
