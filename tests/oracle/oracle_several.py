"""How far is the bound of several pipelines below their optimum?

    python tests/oracle/oracle_several.py [--every K]

tries every plan of two pipelines or more of the listed jobs whose target has them, and prints how
optimum over bound is spread; exits with 1 where a bound is above the optimum.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

import numpy as np
from oracle_instances import Instance, Listed, axes_of, listed
from oracle_optimum import Enumeration
from oracle_price import Prices
from oracle_space import SmallSpace

from hetplan.cost.step_model.pricer import Pricer
from hetplan.predict.fit import FittedPredictor
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.solver import Best
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.table_maker import TableMaker


@dataclass(frozen=True)
class Spread:
    """One job."""

    number: int
    target: str
    optimum: float
    """Infinite where nothing fits."""
    bound: float
    """Of the prices alone, nothing listed and no plan known."""
    listed: float
    """What listing all plans finds."""

    @property
    def ratio(self) -> float:
        """Optimum over bound."""
        return self.optimum / self.bound


def jobs(every: int = 1) -> Iterator[Listed]:
    """Listed jobs that may have several pipelines."""
    found = [row for row in listed() if "pipelines" in row.wanted]
    for row in found[::every]:
        if "pipelines" in axes_of(row.instance()):
            yield row


def optimum(made: Instance, predictor: FittedPredictor) -> float:
    """The least step of two pipelines or more, by trying every plan."""
    prices = Prices(made.model, made.cluster, made.job, predictor)
    product = Pricer(made.model, made.cluster, made.job, predictor) if made.priced else None
    space = SmallSpace(made.model, made.cluster, made.job)
    every = Enumeration(space, prices, product=product)
    wanted = made.job.pin.pipelines
    if wanted != 1:
        every._several(wanted)
    return math.inf if every.found.best is None else every.found.best.seconds


def spread(one: Listed) -> Spread:
    """Optimum, bound and listing of a job."""
    made, predictor = one.instance(), FittedPredictor.datasheet_only()
    job = replace(made.job, gap=0.0)
    cluster = allowed_cluster(made.cluster, job)
    maker = TableMaker(model=made.model, cluster=cluster, job=job, predictor=predictor)
    solver = MultiPipelineSolver(0, maker)
    best = _fresh()
    solver.prove(best)
    bound = solver._bound(_fresh(), math.inf, 3e-3, 30).seconds
    return Spread(
        one.number, one.target, optimum(made, predictor), bound, min(best.seconds, best.bounds[0])
    )


def _fresh() -> Best:
    return Best(bounds=[0.0])


def lines(found: Sequence[Spread]) -> list[str]:
    """The distribution, and every job whose bound is wrong."""
    some = [each for each in found if each.optimum < math.inf]
    ratios = np.array([each.ratio for each in some])
    text = [f"{len(found)} jobs, {len(some)} with a plan; optimum over bound:"]
    for part in (0, 10, 25, 50, 75, 90, 100):
        text.append(f"    {part:3} % of them: up to {np.percentile(ratios, part):.3f}")
    for each in found:
        if wrong(each):
            text.append(
                f"{each.number} {each.target}: optimum {each.optimum:.9g}, bound {each.bound:.9g}, "
                f"listing {each.listed:.9g}"
            )
    return text


def wrong(each: Spread) -> bool:
    """Whether the bound is above the optimum, or listing says something else."""
    if each.optimum == math.inf:
        return each.listed < math.inf
    over = each.bound > each.optimum * (1 + 1e-9)
    return over or abs(each.listed - each.optimum) > 1e-8 * each.optimum


def main() -> int:
    """All chosen jobs; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    found = [spread(one) for one in jobs(parser.parse_args().every)]
    print("\n".join(lines(found)))
    return int(any(map(wrong, found)))


if __name__ == "__main__":
    raise SystemExit(main())
