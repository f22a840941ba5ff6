"""Holds the search against the oracle on listed instances.

    python tests/oracle/oracle_judge.py [--workers N] [--every K] [--only NUMBER] [--vendors]

prints what agreed, by axis, and every fault; exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from oracle_instances import AXES, Instance, Listed, axes_of, listed
from oracle_optimum import Enumeration
from oracle_price import PlacedPipeline, PlacedStage, Prices, State, Step, copies
from oracle_space import SmallSpace

from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search

EQUAL = 1e-8
"""Two sums of the same numbers in another order."""
MAX_SECONDS = 60.0
"""Of one search; then its certificate has to say how far it is."""


@dataclass(frozen=True)
class Verdict:
    """What came of one instance."""

    number: int
    target: str
    axes: tuple[str, ...]
    outcome: str
    """`equal`, `within gap`, `no plan`, or `FAULT`."""
    text: str
    gap: float
    search_seconds: float


def placed_of(plan: Plan) -> tuple[PlacedPipeline, ...]:
    """A plan in the oracle's words."""
    return tuple(
        PlacedPipeline(
            tuple(
                PlacedStage(
                    stage.replicas,
                    tuple((chunk.start, chunk.stop) for chunk in stage.chunks),
                    stage.recompute,
                    stage.warmup_depth,
                )
                for stage in each.stages
            ),
            each.num_microbatches,
            plan.overlap.send,
        )
        for each in plan.pipelines
    )


def with_vendors(made: Instance) -> Instance:
    """The instance with a vendor for each device kind, and so a library of collectives."""
    islands = tuple(
        replace(each, device=replace(each.device, vendor=f"maker of {each.device.kind}"))
        for each in made.cluster.islands
    )
    return replace(made, cluster=replace(made.cluster, islands=islands))


def judge(one: Listed, *, vendors: bool = False, **options: bool) -> Verdict:
    """Whether the search and the oracle agree, with these options of the trainer; `vendors`: every
    kind has another one."""
    made = with_vendors(one.instance()) if vendors else one.instance()
    if options:
        trainer = replace(made.job.trainer, **options)  # type: ignore[arg-type]
        made = replace(made, job=replace(made.job, trainer=trainer))
    predictor = FittedPredictor.datasheet_only()
    axes = tuple(sorted(axes_of(made), key=[*AXES].index))
    prices = Prices(made.model, made.cluster, made.job, predictor)
    product = Pricer(made.model, made.cluster, made.job, predictor) if made.priced else None
    space = SmallSpace(made.model, made.cluster, made.job)
    best = Enumeration(space, prices, product=product).run()
    begin = time.process_time()
    job = replace(made.job, time_limit_seconds=MAX_SECONDS)
    result: SearchResult | None = None
    fault = ""
    try:
        result = search(made.model, made.cluster, job, predictor)
    except (InfeasibleError, InputError) as error:
        # Pins that contradict each other are bad input.
        if best is not None:
            fault = f"no plan ({error}); the oracle has one of {best.seconds:.9g} s: {best.rows}"
    except Exception:
        fault = traceback.format_exc(limit=-3)
    end = time.process_time()
    outcome, gap = "no plan", 0.0
    if result is not None and best is None:
        fault = f"a plan of {result.estimate.step_seconds:.9g} s; the oracle has none"
    elif result is not None and best is not None:
        assert result.certificate is not None, "a search has a certificate"
        gap = result.certificate.gap
        own = _own(prices, product, result.plan)
        step = result.estimate.step_seconds
        equal = step <= best.seconds * (1 + EQUAL)
        outcome = "equal" if equal else "within gap"
        fault = _fault(step, best.seconds, own.seconds, own.fits, result, str(best))
        if not fault:
            found = check_plan(result.plan, made.model, made.cluster, made.job)
            fault = "; ".join(each.message for each in found)
    if fault:
        outcome = "FAULT"
    return Verdict(one.number, one.target, axes, outcome, fault, gap, end - begin)


def _own(prices: Prices, product: Pricer | None, plan: Plan) -> Step:
    """What the judge says of the search's plan."""
    if product is None:
        placed = placed_of(plan)
        every = math.lcm(*(copies(stage) for each in placed for stage in each.stages))
        ranks = 0 if plan.optimizer_shards in (1, every) else plan.optimizer_shards
        return prices.plan(placed, State(plan.sharding, plan.optimizer_offload, ranks))
    step = product.step(plan)
    return Step(step.step_seconds, all(use.fits for memory in step.memory for use in memory))


def _fault(
    step: float, best: float, own: float, fits: bool, result: SearchResult, text: str
) -> str:
    certificate = result.certificate
    assert certificate is not None, "a search has a certificate"
    if abs(own - step) > EQUAL * step:
        return f"the search says {step:.12g} s, the oracle {own:.12g} s of the same plan"
    if not fits:
        return f"the plan of {step:.9g} s does not fit by the oracle's memory"
    if step < best * (1 - EQUAL):
        return f"a plan of {step:.12g} s, below the oracle's {best:.12g}: {result.plan.pipelines}"
    if certificate.lower_bound_seconds > best * (1 + EQUAL):
        return f"bound {certificate.lower_bound_seconds:.12g} above the optimum {best:.12g}: {text}"
    if step > best * (1 + EQUAL) and certificate.status == "optimal":
        return f"{step:.12g} s is called optimal; the optimum is {best:.12g}: {text}"
    return ""


def table(verdicts: Sequence[Verdict]) -> str:
    """Outcomes, proofs and seconds, by target and by axis."""
    kinds = ("equal", "within gap", "no plan", "FAULT")
    lines = [
        f"{'':14}{'jobs':>6}" + "".join(f"{kind:>12}" for kind in (*kinds, "proven", "seconds"))
    ]
    names = [*sorted({v.target for v in verdicts}), *AXES, "all"]
    for name in names:
        rows = [v for v in verdicts if name in (v.target, *v.axes, "all")]
        if rows:
            counts = Counter(row.outcome for row in rows)
            proven = sum(row.outcome == "equal" and row.gap <= EQUAL for row in rows)
            cells = [*(counts[kind] for kind in kinds), proven]
            seconds = sum(row.search_seconds for row in rows)
            lines.append(
                f"{name:14}{len(rows):6}" + "".join(f"{c:12}" for c in cells) + f"{seconds:12.1f}"
            )
    return "\n".join(lines)


def main() -> int:
    """All chosen instances; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--vendors", action="store_true", help="another vendor for every kind")
    asked = parser.parse_args()
    rows = listed()[:: asked.every]
    if asked.only:
        rows = [row for row in listed() if row.number in asked.only]
    verdicts = []
    with ProcessPoolExecutor(asked.workers) as pool:
        for verdict in pool.map(partial(judge, vendors=asked.vendors), rows, chunksize=4):
            verdicts.append(verdict)
            if verdict.outcome == "FAULT":
                print(f"{verdict.number} {verdict.target} {' '.join(verdict.axes)}")
                print(f"    {verdict.text}", flush=True)
    print(table(verdicts))
    return int(any(verdict.outcome == "FAULT" for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
