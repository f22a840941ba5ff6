"""The plan that loses least where links and devices vary over time.

A job says what varies (`Job.vary`), as --vary and --vary-file do. Every draw is a world: the
cluster with other bandwidths and clocks, in which each candidate is priced whole. All candidates
meet the same worlds. What is compared is the mean step of the worst tenth of them (the expected
shortfall, CVaR): unlike p90 it sees how long the worst steps are.

    spread s    bandwidth or speed of a draw is (1 - s)^(-z / 1.645), z standard normal: the
                median is the cluster's figure, and one draw in twenty is below 1 - s of it
    samples     those of the measured distribution, over their median

Each variation takes evenly spaced quantiles of its law in an order of its own (a Latin hypercube,
as `hetplan.cost.step_model.draws`); variations are independent, and all devices or links of one go
together.

Candidates are the best plans of nearby questions (`hetplan.whatif.objectives`) and those found
where each variation, then all together, are at their worst tenth (`bad_days`). The mean over any
tenth of the draws is at most that over the worst: so a candidate that is no better in the tenth
that is worst for the best plan so far is out, priced in that tenth alone.

Nothing bounds the worst tenth of plans that were not tried.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

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
from hetplan.predict.calibration.values import corrected
from hetplan.predict.predictor import Prediction, Predictor, SendLaw
from hetplan.predict.regression import NORMAL_90
from hetplan.search.result import Inputs, Question
from hetplan.search.space.forwarding_predictor import CachingPredictor, ForwardingPredictor
from hetplan.whatif.ask import Change, pairs_between, relinked, widened

DRAWS = 200
"""Over ten seeds the worst tenth deviates by 0.26 % (`python -m evaluation robust`)."""
TENTH = 0.1
_FASTEST_CLOCK = 1.5
"""The most that a cluster may say (`hetplan.cluster.spec.ClockRatio`)."""


def varies(job: Job) -> bool:
    """Whether any draw differs from the cluster."""
    return any(each.spread or len({*each.samples}) > 1 for each in job.vary)


def check_varied(job: Job) -> None:
    """InputError where a robust plan is wanted and nothing is said to vary."""
    if job.objective is Objective.ROBUST and not job.vary:
        message = (
            'robust, and nothing varies: say what, as in --vary "A B 30%" or --vary "h100 5%", or '
            "--vary-file with measured bandwidths"
        )
        raise InputError(Fault(field="objective", message=message))


# ---- What the user says


def said_variation(text: str) -> Variation:
    """`A B 30%` or `h100 5%`; a spread is from 0 % to below 100 %."""
    *names, spread = text.split() or [""]
    number = spread.removesuffix("%")
    try:
        part = float(number) / 100.0 if number != spread else math.nan
        if not 0.0 <= part < 1.0 or len(names) not in (1, 2):
            raise ValueError
    except ValueError:
        message = 'write two regions, or a kind, and 0% to below 100%, as in "A B 30%" or "h100 5%"'
        raise InputError(Fault(field=f"--vary {text[:80]!a}", message=message)) from None
    return Variation(of=tuple(names), spread=part)


def read_variations(path: Path) -> tuple[tuple[Variation, int], ...]:
    """(samples of a pair, the line of its first) of a CSV file with the columns from, to and
    bandwidth..., in any one unit; others are left alone.
    """
    rows = csv.reader(read_text(path).splitlines())
    header = [name.strip() for name in next(rows, [])]
    places = [
        next((at for at, name in enumerate(header) if name.startswith(wanted)), -1)
        for wanted in ("from", "to", "bandwidth")
    ]
    if -1 in places:
        message = "needs the columns from, to and bandwidth, as in from,to,bandwidth_gbit_per_s"
        raise InputError(Fault(file=str(path), line=1, message=message))
    found: dict[tuple[str, ...], list[float]] = {}
    lines: dict[tuple[str, ...], int] = {}
    for row in rows:
        if not any(row):
            continue
        try:
            left, right, text = (row[at].strip() for at in places)
            sample = float(text)
            if not 0.0 < sample < math.inf:
                raise ValueError
        except (IndexError, ValueError):
            message = f"{','.join(row)[:60]!a}: give two names and a bandwidth above 0"
            raise InputError(Fault(file=str(path), line=rows.line_num, message=message)) from None
        pair = tuple(sorted((left, right)))
        found.setdefault(pair, []).append(sample)
        lines.setdefault(pair, rows.line_num)
    if not found:
        raise InputError(Fault(file=str(path), message="holds no samples"))
    return tuple((Variation(of=k, samples=tuple(v)), lines[k]) for k, v in found.items())


def with_variations(question: Inputs, said: Sequence[str], file: Path | None) -> Inputs:
    """The question whose job varies as the options say, beside what its file says.

    InputError with the line or option of what is wrong.
    """
    given = [(said_variation(text), f"--vary {text[:80]!a}", 0) for text in said]
    if file is not None:
        given += [(each, str(file), line) for each, line in read_variations(file)]
    vary = question.job.vary
    for each, place, line in given:
        job = replace(question.job, vary=(*vary, each))
        vary = with_named_ends(job, question.cluster).vary
        for _, message in variation_faults(vary, question.cluster):
            fault = Fault(message=message, line=line)
            raise InputError(replace(fault, file=place) if line else replace(fault, field=place))
    return replace(question, job=replace(question.job, vary=vary))


# ---- Worlds


@dataclass(frozen=True, slots=True)
class _VariedPredictor(ForwardingPredictor):
    """Links that were measured are so many times as fast; of a collective its latency, too."""

    factors: dict[str, float]
    """By name of the samples."""

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """Point-to-point law of a link."""
        law = self.predictor.send(link, message_bytes, nodes=nodes)
        factor = self.factors.get(link.samples or "", 1.0)
        return replace(law, seconds_per_byte=law.seconds_per_byte / factor)

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """Time of a collective."""
        found = self.predictor.collective(
            link, operation, group_size, message_bytes, nodes=nodes, groups=groups
        )
        return corrected(found, 1.0 / self.factors.get(link.samples or "", 1.0))


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
        predictor = _VariedPredictor(self.predictor, measured) if measured else self.predictor
        return self.question.changed(cluster=cluster), predictor

    def bad_days(self) -> Iterator[tuple[Change, Predictor]]:
        """The question with each variation where one draw in ten is worse, and with all."""
        bad = np.quantile(self.factors, TENTH, axis=1)
        names = [" ".join(each.of) for each in self.question.job.vary]
        rows = [np.where(np.arange(len(bad)) == at, bad, 1.0) for at in range(len(bad))]
        if len(bad) > 1:
            rows, names = [*rows, bad], [*names, "all that varies"]
        for row, name in zip(rows, names, strict=True):
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
    return replace(
        cluster,
        islands=tuple(
            replace(each, clock_ratio=min(_FASTEST_CLOCK, factor * each.clock_ratio))
            if name in (each.name, each.device.kind)
            else each
            for each in cluster.islands
        ),
    )


def _linked(cluster: Cluster, ends: tuple[str, str], changed: Callable[[Link], Link]) -> Cluster:
    """The cluster with the links between two regions or islands changed; islands of two regions
    without a link of their own go by that of their regions.
    """
    pairs = {frozenset(ends)}
    if not {*ends} <= {*cluster.regions}:
        regions = (cluster.island(ends[0]).region, cluster.island(ends[1]).region)
        if regions[0] == regions[1] and not cluster.lists_link(*ends):
            return relinked(cluster, [ends], changed)
        ends = ends if cluster.lists_link(*ends) else regions
    if {*ends} <= {*cluster.regions}:
        pairs = {frozenset(pair) for pair in pairs_between(cluster, ends)}
        regional = [each.link for each in cluster.region_links if {*each.between} == {*ends}]
        known = regional or [link for link in (cluster.across_regions,) if link is not None]
        others = tuple(each for each in cluster.region_links if {*each.between} != {*ends})
        own = tuple(RegionLink(between=ends, link=changed(link)) for link in known)
        cluster = replace(cluster, region_links=(*others, *own))
    links = tuple(
        replace(each, link=changed(each.link)) if frozenset(each.between) in pairs else each
        for each in cluster.links
    )
    return replace(cluster, links=links)


def _scaled(link: Link, factor: float, measured: dict[str, float]) -> Link:
    """The link so many times as wide; one that was measured is noted, and keeps its samples."""
    if link.samples is not None:
        measured[link.samples] = factor
    return replace(widened(link, factor), samples=link.samples)


# ---- The aim


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A plan's step over all draws."""

    worst_seconds: float
    """Mean of the worst tenth."""
    median_seconds: float


def risk_of(steps: Floats) -> tuple[Risk, Ints]:
    """(what the draws say, which of them are the worst tenth)."""
    worst = np.argsort(-steps, kind="stable")[: max(1, round(TENTH * len(steps)))]
    return Risk(
        worst_seconds=float(np.mean(steps[worst])), median_seconds=float(np.median(steps))
    ), worst


def risks(worlds: Worlds, plans: Mapping[Plan, float]) -> dict[Plan, Risk]:
    """Of the first plan, and of each that beats those before it; plans: with their steps as
    estimated, whose waits for slow ranks scale the draws.
    """
    found: dict[Plan, Risk] = {}
    least, worst = math.inf, np.arange(0)
    question, every = worlds.question, range(worlds.factors.shape[1])
    pricer = Pricer(question.model, question.cluster, question.job, worlds.predictor)
    for plan, step_seconds in plans.items():
        scale = step_seconds / pricer.step(plan).step_seconds
        if found and scale * float(np.mean(worlds.seconds(plan, worst))) >= least:
            continue
        risk, at = risk_of(scale * worlds.seconds(plan, every))
        if risk.worst_seconds < least:
            found[plan], least, worst = risk, risk.worst_seconds, at
    return found
