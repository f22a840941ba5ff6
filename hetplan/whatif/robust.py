"""The plan that loses least where links and devices vary over time.

A job says what varies (`Job.vary`), as --vary and --vary-file do. Every draw is a world: the
cluster with other bandwidths and clocks, in which each candidate is priced whole. All candidates
meet the same worlds. What is compared is the mean step of the worst tenth (the expected shortfall,
CVaR): unlike p90 it sees how long the worst steps are.

    spread s    a draw's bandwidth or speed is (1 - s)^(-z / 1.645) of the cluster's, z standard
                normal: one draw in twenty is below 1 - s
    samples     those of the measured distribution, over their median

(no clock is above 1.5 times the catalogue's, the most that a cluster may say).

Each variation takes evenly spaced quantiles of its law in an order of its own (a Latin hypercube,
as `hetplan.cost.step_model.draws`); variations are independent, and all that one names go together.

Candidates are the best plans of nearby questions (`hetplan.whatif.objectives`) and of `bad_days`.
The mean over any tenth of the draws is at most that over the worst: so a candidate that is no
better in the tenth that is worst for the best plan so far is out, priced in that tenth alone.
Nothing bounds the worst tenth of plans that were not tried.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from hetplan.cluster.spec import Cluster, Link, RegionLink
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.step_model.draws import normal_quantiles
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.job.spec import Job, Objective, Variation
from hetplan.plans.check_job import variation_faults
from hetplan.plans.pinned import with_named_ends
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.predict.regression import NORMAL_90
from hetplan.search.result import Inputs, Question
from hetplan.search.space.forwarding_predictor import CachingPredictor, VariedPredictor
from hetplan.whatif.ask import Change, pairs_between, relinked, widened

DRAWS = 200
"""Over ten seeds the worst tenth deviates by 0.26 % (`python -m evaluation robust`)."""
TENTH = 0.1
"""The part of the draws that is compared: the worst decile."""
_FASTEST_CLOCK = 1.5
"""The most that a cluster may say (`hetplan.cluster.spec.ClockRatio`)."""


def check_varied(job: Job) -> None:
    """InputError where a robust plan is wanted and nothing is said to vary."""
    if job.objective is Objective.ROBUST and not job.vary:
        message = 'robust: say what varies, as in --vary "A B 30%" or "h100 5%", or --vary-file CSV'
        raise InputError(Fault(field="objective", message=message))


def said_variation(text: str) -> Variation:
    """`A B 30%` or `h100 5%`; a spread is from 0 % to below 100 %."""
    found = re.fullmatch(r"(\S+) (\S+ )?(\d\d?(?:\.\d+)?)%", " ".join(text.split()), re.ASCII)
    if found is None:
        message = 'write two regions, or a kind, and 0% to below 100%, as in "A B 30%" or "h100 5%"'
        raise InputError(Fault(field=f"--vary {text[:80]!a}", message=message))
    of = tuple(name.strip() for name in found.groups()[:2] if name)
    return Variation(of=of, spread=float(found[3]) / 100.0)


def read_variations(path: Path) -> Iterator[tuple[Variation, int]]:
    """(samples of a pair, the line of its first) of a CSV file with the columns from, to and
    bandwidth..., in any one unit; others are left alone.
    """
    rows = csv.DictReader(read_text(path).splitlines())
    name = next((name for name in rows.fieldnames or () if name.startswith("bandwidth")), "")
    if not {"from", "to"} < {*(rows.fieldnames or ())} or not name:
        message = "needs the columns from, to and bandwidth, as in from,to,bandwidth_gbit_per_s"
        raise InputError(Fault(file=str(path), line=1, message=message))
    found: dict[tuple[str, ...], tuple[int, list[float]]] = {}
    for row in rows:
        try:
            pair, sample = tuple(sorted((row["from"], row["to"]))), float(row[name])
            if not 0.0 < sample < math.inf:
                raise ValueError
        except (TypeError, ValueError):
            found_here = ",".join(map(str, row.values()))[:60]
            message = f"{found_here!a}: give two names and a number above 0, without a unit"
            fault = Fault(file=str(path), line=rows.line_num, message=message)
            raise InputError(fault) from None
        found.setdefault(pair, (rows.line_num, []))[1].append(sample)
    if not found:
        raise InputError(Fault(file=str(path), message="holds no samples"))
    for pair, (line, samples) in found.items():
        yield Variation(of=pair, samples=tuple(samples)), line


def with_variations(question: Inputs, said: Sequence[str], file: Path | None) -> Inputs:
    """The question whose job varies as the options say, beside what its file says.

    InputError with the line or option of what is wrong.
    """
    if (said or file) and question.job.objective is not Objective.ROBUST:
        raise InputError("--vary and --vary-file go with --objective robust")
    given = [(said_variation(text), f"--vary {text[:80]!a}", 0) for text in said]
    try:
        given += [(each, str(file), line) for each, line in (read_variations(file) if file else ())]
    except csv.Error as error:
        raise InputError(Fault(file=str(file), message=f"is no CSV file: {error}")) from None
    job = question.job
    for each, place, line in given:
        job = with_named_ends(replace(job, vary=(*job.vary, each)), question.cluster)
        for _, message in variation_faults(job.vary, question.cluster):
            where = {"file": place, "line": line} if line else {"field": place}
            raise InputError(Fault(message=message, **where))
    return replace(question, job=job)


@dataclass(frozen=True, slots=True)
class Worlds:
    """The draws in which all candidates are priced."""

    question: Question
    predictor: Predictor
    factors: Floats
    """On bandwidth or speed: [variations, draws]."""

    @classmethod
    def of(cls, question: Question, predictor: Predictor, count: int = DRAWS) -> Worlds:
        """Those of the job's seed."""
        order = np.random.default_rng((question.job.seed, 2))
        rows = [order.permutation(_law(each, count)) for each in question.job.vary]
        return cls(question, CachingPredictor(predictor), np.array(rows))

    def seconds(self, plan: Plan, draws: Iterable[int]) -> Floats:
        """A plan's step in these draws."""
        found = []
        for draw in draws:
            there, predictor = self.world(self.factors[:, draw])
            pricer = Pricer(there.model, there.cluster, there.job, predictor)
            found.append(pricer.step(plan).step_seconds)
        return np.array(found)

    def world(self, factors: Iterable[float]) -> tuple[Question, Predictor]:
        """(the question, its predictor) where each of the job's variations has this factor."""
        cluster = self.question.cluster
        measured: dict[str, float] = {}
        for variation, factor in zip(self.question.job.vary, map(float, factors), strict=True):
            if factor == 1.0:
                continue
            if len(variation.of) == 1:
                cluster = _at_speed(cluster, variation.of[0], factor)
            else:
                changed = partial(_scaled, factor=factor, measured=measured)
                cluster = _linked(cluster, (variation.of[0], variation.of[1]), changed)
        predictor = VariedPredictor(self.predictor, measured) if measured else self.predictor
        return self.question.changed(cluster=cluster), predictor

    def bad_days(self) -> Iterator[tuple[Change, Predictor]]:
        """The question with each variation where one draw in ten is worse, and with all."""
        bad, count = np.quantile(self.factors, TENTH, axis=1), len(self.factors)
        names = [" ".join(each.of) for each in self.question.job.vary]
        for at, name in enumerate([*names, "all that varies"] if count > 1 else names):
            row = np.where((np.arange(count) == at) | (at == count), bad, 1.0)
            question, predictor = self.world(row)
            yield Change(words=f"a bad day of {name}", question=question), predictor


def _law(variation: Variation, count: int) -> Floats:
    """Evenly spaced quantiles of a variation's factor, the lowest first."""
    if variation.samples:
        at = (np.arange(count) + 0.5) / count
        found: Floats = np.quantile(variation.samples, at, method="hazen")
        return found / median(variation.samples)
    width = -math.log1p(-(variation.spread or 0.0)) / NORMAL_90
    return np.exp(width * normal_quantiles(count))


def _at_speed(cluster: Cluster, name: str, factor: float) -> Cluster:
    """The cluster whose islands of this name or kind compute so many times as fast."""
    for each in cluster.islands:
        if name in (each.name, each.device.kind):
            clock = min(_FASTEST_CLOCK, factor * each.clock_ratio)
            cluster = cluster.with_island(replace(each, clock_ratio=clock))
    return cluster


def _linked(cluster: Cluster, ends: tuple[str, str], changed: Callable[[Link], Link]) -> Cluster:
    """The cluster with the links between two regions or islands changed; islands of two regions
    without a link of their own go by that of their regions.
    """
    pairs = [ends]
    if {*ends} <= {*cluster.regions}:
        pairs = pairs_between(cluster, ends)
    elif not cluster.lists_link(*ends):
        ends = (cluster.island(ends[0]).region, cluster.island(ends[1]).region)
        if ends[0] == ends[1]:
            return relinked(cluster, pairs, changed)
    if {*ends} <= {*cluster.regions}:
        others = tuple(each for each in cluster.region_links if {*each.between} != {*ends})
        own: list[Link | None] = [each.link for each in cluster.region_links if each not in others]
        for link in filter(None, own or [cluster.across_regions]):
            others = (*others, RegionLink(between=ends, link=changed(link)))
        cluster = replace(cluster, region_links=others)
    named = {frozenset(pair) for pair in pairs}
    links = tuple(
        replace(each, link=changed(each.link)) if frozenset(each.between) in named else each
        for each in cluster.links
    )
    return replace(cluster, links=links)


def _scaled(link: Link, factor: float, measured: dict[str, float]) -> Link:
    """The link so many times as wide; one that was measured is noted, and keeps its samples."""
    if link.samples is not None:
        measured[link.samples] = factor
    return replace(widened(link, factor), samples=link.samples)


class Risk(NamedTuple):
    """A plan's step over all draws: mean of the worst tenth, median, and which draws are worst."""

    worst_seconds: float
    median_seconds: float
    worst: Ints


def risk_of(steps: Floats) -> Risk:
    """What the draws say."""
    worst = np.argsort(-steps, kind="stable")[: max(1, round(TENTH * len(steps)))]
    return Risk(float(np.mean(steps[worst])), float(np.median(steps)), worst)


def risks(worlds: Worlds, plans: Mapping[Plan, float]) -> dict[Plan, Risk]:
    """Of the first plan, and of each that beats those before it; plans: with their steps as
    estimated, whose waits for slow ranks scale the draws.
    """
    found: dict[Plan, Risk] = {}
    best, question = None, worlds.question
    pricer = Pricer(question.model, question.cluster, question.job, worlds.predictor)
    for plan, step_seconds in plans.items():
        scale = step_seconds / pricer.step(plan).step_seconds
        if best and scale * np.mean(worlds.seconds(plan, best.worst)) >= best.worst_seconds:
            continue
        risk = risk_of(scale * worlds.seconds(plan, range(worlds.factors.shape[1])))
        if best is None or risk.worst_seconds < best.worst_seconds:
            found[plan] = best = risk
    return found
