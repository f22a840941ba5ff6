"""Draws the instances of `make oracle` and writes what they cover.

    python tests/oracle/oracle_table.py --draw     a new table.csv (minutes)
    python tests/oracle/oracle_table.py            print what table.csv covers

Targets and axes are drawn at random until there are enough instances and every pair of axes is on
together often enough; jobs that the oracle cannot try in full are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

import numpy as np
from oracle_instances import AXES, FREE, PRICED, TABLE, Listed, axes_of, listed, possible
from oracle_optimum import TooManyPlansError, number_of_plans
from oracle_price import Prices
from oracle_space import SmallSpace

from hetplan.predict.fit import FittedPredictor

MIN_INSTANCES = 2000
MIN_TOGETHER = 100
MIN_PRICED = 25
"""Of pairs with an axis that the product prices."""
MAX_PRICED_PLANS = 400
MAX_PLANS = 10_000
MAX_DEVICES = 6
MAX_EMPTY = 0.02
"""Part of the instances that may have no plan by their divisors alone."""
TARGET_WEIGHTS = {
    "any": 0.36,
    "native": 0.22,
    "megatron": 0.18,
    "flagscale": 0.12,
    "torchtitan": 0.12,
}

Pair = tuple[str, str]

HOW_JUDGED = {
    "islands": "every sequence of meshes on disjoint islands",
    "stages": "every number of stages of every mesh",
    "layers": "every composition of the layer units",
    "dp": "every divisor of the batch that fills parts of nodes or whole ones",
    "tp": "every divisor of a node that the model allows",
    "cp": "every power of two up to 16 that the sequence allows",
    "ep": "every divisor of the experts, etp 1 or tp",
    "microbatch": "every divisor of the batch over dp",
    "interleaving": "every number of chunks, layers dealt evenly; own replay of the order",
    "depth": "every choice per mesh up to 8, with sends that do not wait",
    "recompute": "every choice, per stage where the target can",
    "selective": "every choice, with unfused attention",
    "sharding": "both, with their reductions, gatherings and memory",
    "shapes": "every mesh with the same samples per microbatch",
    "pipelines": "every sequence of pipelines that makes up the batch and has room",
    "mixed": "every pair of shapes on two islands of unlike kinds in a region",
    "unions": "2 to 4 islands of a kind, dp equal or as their nodes",
    "tight": "own memory formulas; an instance without a plan must be infeasible",
    "regions": "links of 2 or 20 ms; nothing is assumed about the order",
    "limits": "plans that break a pin are not tried",
    "tied": "both ends sum the matrix; flagscale's rule for the ends",
    "units": "cuts between units only",
    "capacity": "every plan priced whole by the product",
    "mtp": "every plan priced whole by the product",
}


def pairs_of(rows: list[frozenset[str]]) -> Counter[Pair]:
    """How many of these have both axes on."""
    found: Counter[Pair] = Counter()
    for on in rows:
        found.update(combinations([name for name in AXES if name in on], 2))
    return found


def every_pair() -> Iterator[Pair]:
    """All pairs, in the order of `AXES`."""
    return combinations(AXES, 2)


def least_of(pair: Pair) -> int:
    """In how many instances a pair has to be on."""
    return MIN_PRICED if set(pair) & set(PRICED) else MIN_TOGETHER


def draw() -> list[Listed]:
    """Enough instances; equal for equal code."""
    rng = np.random.default_rng(20261121)
    predictor = FittedPredictor.datasheet_only()
    found: list[Listed] = []
    together: Counter[Pair] = Counter()
    empty = seed = 0
    while (
        len(found) < MIN_INSTANCES
        or min(together[pair] - least_of(pair) for pair in every_pair()) < 0
    ):
        seed += 1
        target = str(rng.choice([*TARGET_WEIGHTS], p=[*TARGET_WEIGHTS.values()]))
        scarce = min(every_pair(), key=lambda pair: together[pair] / least_of(pair))
        part = {name: 0.04 if name in PRICED else 0.36 for name in FREE}
        wanted = {name for name in FREE if rng.random() < part[name]} | set(scarce) & set(FREE)
        wanted = {name for name in wanted if possible(target, frozenset({name}))}
        names = tuple(name for name in FREE if name in wanted)
        one = Listed(len(found), target, names, seed, 0).instance()
        if one.cluster.num_devices > MAX_DEVICES or one.cluster.num_devices < 2:
            continue
        on = axes_of(one)
        full = len(found) >= MIN_INSTANCES
        if full and not any(together[pair] < least_of(pair) for pair in combinations_of(on)):
            continue
        prices = Prices(one.model, one.cluster, one.job, predictor)
        try:
            space = SmallSpace(one.model, one.cluster, one.job)
            plans = number_of_plans(space, prices, MAX_PRICED_PLANS if one.priced else MAX_PLANS)
        except TooManyPlansError:
            continue
        if not plans:
            if empty >= MAX_EMPTY * len(found):
                continue
            empty += 1
        together.update(combinations_of(on))
        found.append(Listed(len(found), target, names, seed, plans))
    return found


def combinations_of(on: frozenset[str]) -> list[Pair]:
    """All pairs of the axes that are on."""
    return [*combinations([name for name in AXES if name in on], 2)]


def write_table(rows: list[Listed]) -> None:
    """table.csv."""
    lines = ["number,target,wanted,seed,plans"]
    lines += [f"{r.number},{r.target},{' '.join(r.wanted)},{r.seed},{r.plans}" for r in rows]
    TABLE.write_text("\n".join(lines) + "\n")


def coverage(rows: list[Listed]) -> str:
    """How many instances have each axis open, and each pair of axes, as Markdown."""
    made = [(row, axes_of(row.instance())) for row in rows]
    together = pairs_of([on for _, on in made])
    targets = sorted({row.target for row in rows})
    own = [pair for pair in every_pair() if not set(pair) & set(PRICED)]
    least = min(own, key=lambda pair: together[pair])
    total = sum(row.plans for row in rows)
    lines = [
        f"{len(rows):,} jobs of 2 to {MAX_DEVICES} devices and 3 to 10 layers; {total:,} plans.",
        "Every axis that is off is pinned by the job. The rarest pair of axes, "
        f"{least[0]} and {least[1]}, is on together in {together[least]} of them.",
        "Instances with shared capacity or multi-token prediction are enumerated like the others; "
        "their plans are priced as `hetplan estimate` does, "
        f"pairs with these two are on together at least {MIN_PRICED} times.",
        "",
        "## Axes",
        "| axis | what is open | on | " + " | ".join(targets) + " | how the judge has it |",
        "|---|---|---|" + "---|" * len(targets) + "---|",
    ]
    for name, text in AXES.items():
        each = Counter(row.target for row, on in made if name in on)
        counts = " | ".join(str(each[target] or "") for target in targets)
        lines.append(f"| {name} | {text} | {each.total()} | {counts} | {HOW_JUDGED[name]} |")
    lines += [
        "",
        "## Pairs",
        "Instances in which both are on.",
        "",
        "| | " + " | ".join(AXES) + " |",
        "|---|" + "---|" * len(AXES),
    ]
    for one in AXES:
        cells = [str(together[tuple(sorted((one, two), key=[*AXES].index))]) for two in AXES]  # type: ignore[index]
        cells[[*AXES].index(one)] = ""
        lines.append(f"| {one} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--draw" in sys.argv:
        write_table(draw())
    print(coverage(listed()), end="")
