"""Who makes a run slow: the host, rank, NIC or link that stands out from its like.

In each window w (a step for ranks; for flows as long as most of their records) suspect i has

    y_iw = log(compute seconds / predicted) of a rank, log(busy seconds / bytes) of a flow
    x_iw = y_iw - median of y over its like

Neither figure counts waiting for a partner. Like a rank are ranks of equal work on other hosts;
else ranks of its kind there, where half of the plan's interval is added to L; else those of equal
work on its own. Like a flow are flows over links of equal figures that carry up to twice as much or
half; one alone is held against its link's rate, where the round trip does not matter to it.

i is slow where x_iw > L in h of the n windows of a block, more than chance explains:

    L    the larger of log(1.15) and 3/4 of the spread, 1.4826 times the median absolute deviation
         of x from each one's own median: a normal innocent is above it in 23 of 100 windows
    p_i  P(Binomial(n, 1/4) >= h), with n and h times (1 - r) / (1 + r), as noise that lasts makes
         windows tell less: r is x's autocorrelation from window to window, its bias mended

A flow is lossy by the same test of windows in which 0.1 % of its bytes were sent again, against the
share of such windows of its like, at least 1/10. In the k-th block i is accused where p_i times the
tests of the block is at most 0.05 * 6 / (pi k)^2: chance accuses an innocent in less than 5 of 100
runs, as far as windows are independent. Confidence is 1 - p_i times the tests.

All ranks of a host (two or more) are the host; all flows of a port to or from several others its
NIC. Others wait for who is slow: not accused of slowness are flows of a host with slow ranks, those
less than 2/3 as slow (in logarithms) as the slowest, and any while one is lossy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pandas
from numpy.typing import NDArray

from hetplan.cluster.spec import Link
from hetplan.comparison.telemetry import Run
from hetplan.cost.network import segments
from hetplan.cost.traffic import ledger
from hetplan.errors import printable
from hetplan.runtime.telemetry import COMPUTE, Record
from hetplan.units import counted, format_bytes

SCHEMA = "hetplan.suspects/1"
# All are our choices, made by reasoning and on the emulated runs of seeds 0 and 1 of
# `python -m evaluation faults`.
BLOCK = 20  # windows: 14 of them accuse one of 20 suspects
LEAST_WINDOWS = 8
MARGIN = math.log(1.15)  # devices of a kind differ by some percent
SPREADS = 0.75
LEVEL = 0.05  # of all accusations of a clean run
GRANTED = 0.25  # windows above the margin that an innocent has
LOSS_GRANTED = 0.1  # windows with losses that an innocent has
LOSS_SHARE = 1e-3  # bytes sent again, of all
LEAST_BYTES = 65_536  # less says how long a message takes, not how fast the link is
COUPLED = 2 / 3  # part of the largest log(factor): what goes round a ring trickles everywhere
MOST_LASTING = 0.95  # autocorrelation: longer noise is as good as a fault
ALONE_MARGIN = math.log(2.0)  # headers, slow starts and sharing of a link
LONG_TRANSFER = 10.0  # times what is under way in a round trip, which is then a tenth of the time

Array: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[str, ...]
"""Of a rank: its number; of a flow: source and target; of a port one of them is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A host, rank, NIC or link that was tested in one block of windows, and what was found."""

    kind: str = ""
    name: str = ""
    key: Key
    cause: str
    """`slow`, or of a link or NIC `lossy`."""
    factor: float
    """Times as long as its like in the median window; of a lossy one the share sent again."""
    hits: int
    """Windows in which it stands out, of so many from this step on (0: no timer tells)."""
    windows: int
    first: int
    chance: float
    """That an innocent stands out in as many windows, at most."""
    confidence: float = 0.0
    """1 - the chance that any innocent of those tested in the block does."""
    note: str = ""

    @property
    def line(self) -> str:
        """In one line, for a person."""
        how = f"takes {self.factor:.2f} times as long as its like"
        if self.cause == "lossy":
            how = f"sends {self.factor:.1%} of its bytes again"
        window = "step" if self.kind in ("host", "rank") else "window"
        sure = min(99.99, math.floor(self.confidence * 1e4) / 100)  # no more is claimed
        return (
            f"{self.cause} {self.kind}: {printable(self.name)} {how}; it stands out in {self.hits} "
            f"of {counted(self.windows, window)} from step {self.first} on (confidence "
            f"{sure:.2f} %)" + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What telemetry says of a run."""

    suspects: tuple[Suspect, ...]
    """Surest first; of each its surest block."""
    ranks: int
    """Ranks and flows that could be judged in some block."""
    flows: int
    not_judged: int
    """Others: without their like, or with too few windows or bytes."""
    carried: tuple[tuple[str, float, float], ...]
    """Link, measured and planned bytes of a step, both ways."""

    @property
    def lines(self) -> Iterator[str]:
        """For a person, most important first."""
        yield from [each.line for each in self.suspects] or ["nobody stands out"]
        left = f"; not {self.not_judged} others: no like, few windows or few bytes"
        yield (
            f"judged: {counted(self.ranks, 'rank')}, {counted(self.flows, 'flow')}"
            + (left if self.not_judged else "")
        )
        for link, measured, planned in self.carried:
            sizes = (format_bytes(measured), format_bytes(planned))
            yield f"{printable(link)}: {sizes[0]} a step, the plan counts {sizes[1]}"


def judge(records: Sequence[Record], run: Run) -> Verdict:
    """Who stands out in telemetry that belongs to the run (`read_telemetry`)."""
    found, judged = list[Suspect](), set[Key]()
    for at, block in enumerate(blocks(records), start=1):
        suspects, tested = judge_block(block, run, at)
        found, judged = found + suspects, judged | tested
    found.sort(key=lambda each: (-each.chance, each.name))
    surest = {(each.kind, each.name, each.cause): each for each in found}
    timers = {(str(each.rank),) for each in records if each.part == COMPUTE}
    flows = {each.flow[:2] for each in records if each.bytes is not None}
    steps = len({each.step for each in records} - {None})
    return Verdict(
        suspects=tuple(sorted(surest.values(), key=lambda each: (each.chance, each.name))),
        ranks=len(timers & judged),
        flows=len(flows & judged),
        not_judged=len((timers | flows) - judged),
        carried=tuple(_carried(records, run, steps)),
    )


def judge_block(records: Sequence[Record], run: Run, number: int) -> tuple[list[Suspect], set[Key]]:
    """Who stands out in one block, the how manieth of its run, and who was tested."""
    tests = [*_rank_tests(records, run), *_flow_tests(records, run)]
    level = LEVEL * 6 / (math.pi * number) ** 2 / max(1, len(tests))
    guilty = [test for test in tests if test.chance <= level]
    return list(_named(guilty, tests, run)), {test.key for test in tests}


def blocks(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Records of so many windows each; the last block has the rest too, where that is little."""
    begins: dict[float, float] = {}
    has_steps = any(each.step is not None for each in records)
    width = float(np.median([each.window_seconds for each in records])) if records else 1.0
    for each in records:
        if each.step is not None or not has_steps:
            window = each.begin_seconds // width if each.step is None else each.step
            begins[window] = min(begins.get(window, math.inf), each.begin_seconds)
    order = sorted(begins.values())
    count = max(1, (len(order) + BLOCK - LEAST_WINDOWS) // BLOCK)
    ends = [order[at * BLOCK] for at in range(1, count)]
    parts: list[list[Record]] = [[] for _ in range(count)]
    for each in records:
        parts[bisect_right(ends, each.begin_seconds)].append(each)
    yield from parts


# ---- tests


def _test(
    key: Key,
    cause: str,
    factor: float,
    first: int,
    stands_out: Array,
    share: float,
    part: float = 1.0,
) -> Suspect:
    """A suspect, and the chance that an innocent stands out in as many of the windows; part: of the
    windows that are worth a window each.
    """
    from scipy.special import betainc

    hits, count = int(stands_out.sum()), len(stands_out)
    # P(Binomial(count, share) >= hits), for parts of windows too
    chance = float(betainc(part * hits, part * (count - hits) + 1.0, share)) if hits else 1.0
    return Suspect(
        key=key, cause=cause, factor=factor, hits=hits, windows=count, first=first, chance=chance
    )


def _log(values: Array) -> Array:
    with np.errstate(all="ignore"):
        found = np.log(values)
    return np.where(np.isfinite(found), found, math.nan)


def _excess(figures: Array, like: Sequence[list[int]]) -> tuple[Array, float]:
    """Each column less the median of its like, window by window, and the margin by their spread."""
    found, frame = pandas.DataFrame(figures * math.nan), pandas.DataFrame(figures)
    for column, others in enumerate(like):
        middle = frame[others].median(axis=1)
        # Where none of the like has the window, their usual figure.
        found[column] = frame[column] - middle.fillna(middle.median())
    spread = 1.4826 * float(
        pandas.Series((found - found.median()).to_numpy().ravel()).abs().median()
    )
    return found.to_numpy(dtype=float), max(MARGIN, SPREADS * spread)


def _slow(key: Key, excess: Array, first: int, margin: float, note: str = "") -> Iterator[Suspect]:
    known = excess[np.isfinite(excess)]
    if len(known) >= LEAST_WINDOWS:
        factor, above = math.exp(float(np.median(known))), np.where(known > margin, 1.0, 0.0)
        test = _test(key, "slow", factor, first, above, GRANTED, _independent(known))
        yield replace(test, note=note)


def _independent(series: Array) -> float:
    """Part of its windows that tell as much as independent ones."""
    apart = series - series.mean()
    whole, count = float(apart @ apart), len(series)
    found = float(apart[1:] @ apart[:-1]) / whole if whole else 0.0
    # A short series shows less than there is (Kendall, Biometrika 41, 1954).
    lasting = min(MOST_LASTING, max(0.0, found + (1.0 + 4.0 * found) / count))
    return (1.0 - lasting) / (1.0 + lasting)


def _rank_tests(records: Sequence[Record], run: Run) -> Iterator[Suspect]:
    rows = {(each.step, each.rank): each.seconds for each in records if each.part == COMPUTE}
    if not rows:
        return
    block = pandas.Series(rows, dtype=float).unstack().sort_index()
    ranks, like, extra = [run.ranks[int(rank)] for rank in block.columns], [], []
    interval = run.result.estimate.interval
    for own in ranks:
        away = [at for at, one in enumerate(ranks) if one.host != own.host]
        equal = [at for at in away if ranks[at].work == own.work]
        kind = [at for at in away if ranks[at].kind == own.kind]
        near = [at for at, one in enumerate(ranks) if one.work == own.work and one is not own]
        like.append(equal or kind or near)
        doubt = math.log(interval.p90_seconds / interval.p10_seconds) / 2
        extra.append(doubt if kind and not equal else 0.0)
    predicted = np.array([each.compute_seconds or math.nan for each in ranks])
    excess, margin = _excess(_log(block.to_numpy(dtype=float) / predicted), like)
    for at, rank in enumerate(block.columns):
        note = "nobody does equal work: by the plan's prediction" if extra[at] else ""
        first = int(block.index[0])
        yield from _slow((str(rank),), excess[:, at], first, margin + extra[at], note)


def _flow_tests(records: Sequence[Record], run: Run) -> Iterator[Suspect]:
    rows = [each for each in records if each.bytes is not None]
    if not rows:
        return
    names = ["source", "target", "bytes", "busy_seconds", "resent_bytes"]
    values = [[getattr(each, name) for name in names] for each in rows]
    width = float(np.median([each.window_seconds for each in rows]))
    middles = np.array([each.begin_seconds + each.window_seconds / 2 for each in rows])
    frame = pandas.DataFrame(values, columns=names).astype(dict.fromkeys(names[2:], float))
    wide = (
        frame.assign(window=(middles - middles.min()) // width)
        .groupby(["window", *names[:2]])
        .sum(min_count=1)
        .unstack([1, 2])
    )
    sent, busy, resent = (wide[name].to_numpy(dtype=float) for name in names[2:])
    keys: list[Key] = list(wide["bytes"].columns)
    whole = np.nansum(sent, axis=0)
    first = min((each.step for each in records if each.step is not None), default=0)
    lost = np.where(np.isfinite(resent), resent >= LOSS_SHARE * np.maximum(sent, 1.0), math.nan)
    links = [_link_of(run, key) for key in keys]
    like = [
        [
            at
            for at, link in enumerate(links)
            if at != own and link == links[own] and whole[own] / 2 <= whole[at] <= whole[own] * 2
        ]
        for own in range(len(keys))
    ]
    figures = _flow_figures(sent, busy)
    excess, margin = _excess(figures, like)
    for at, key in enumerate(keys):
        known, note = lost[np.isfinite(lost[:, at]), at], ""
        if np.isnan(busy[:, at]).all():
            note = "its busy time is not known: by its fullest windows"
        elif not len(known):
            note = "shaped or lossy cannot be told apart"
        link, devices, _ = links[at]
        if like[at]:
            yield from _slow(key, excess[:, at], first, margin, note)
        elif link is not None:
            shared = segments.shared_bytes_per_second(link) / links.count(links[at])
            rate = min(link.bandwidth_bytes_per_second * devices, shared)
            if np.nanmedian(sent[:, at]) >= LONG_TRANSFER * rate * 2 * link.latency_seconds:
                own_excess, note = figures[:, at] + math.log(rate), "by the link's own rate"
                yield from _slow(key, own_excess, first, ALONE_MARGIN, note)
        share, of_like = float(np.nansum(resent[:, at]) / max(1.0, whole[at])), lost[:, like[at]]
        if len(known) >= LEAST_WINDOWS and share >= LOSS_SHARE:
            usual = float(np.nansum(of_like) / max(1, np.isfinite(of_like).sum()))
            yield _test(key, "lossy", share, first, known, max(LOSS_GRANTED, usual))


def _flow_figures(sent: Array, busy: Array) -> Array:
    """log(busy seconds / bytes) of windows that carry enough. Where busy time is not known it is
    the whole window, of the fullest quarter of the windows: nobody is judged by a pause.
    """
    carried = np.where(sent >= LEAST_BYTES, sent, math.nan)
    figures = _log(busy / carried)
    for at in np.flatnonzero(np.isnan(busy).all(axis=0) & np.isfinite(carried).any(axis=0)):
        least = np.nanquantile(carried[:, at], 0.75)
        figures[:, at] = -_log(np.where(carried[:, at] >= least, carried[:, at], math.nan))
    return figures


def _link_of(run: Run, key: Key) -> tuple[Link | None, int, str]:
    """What flows that go alike have in common: link and devices behind it, or a port's island."""
    one, two = (run.islands.get(run.node_of(end)) for end in key)
    if one and two:
        link = run.result.inputs.cluster.link_between(one.name, two.name)
        return link, min(one.devices_per_node, two.devices_per_node), ""
    return None, 0, f"out of {one.name}" if one else f"into {two.name if two else ''}"


# ---- names


def _named(guilty: Sequence[Suspect], tests: Sequence[Suspect], run: Run) -> Iterator[Suspect]:
    """The fewest names that explain what was found in one block."""
    tested = {test.key for test in tests}
    hosts: dict[Key, str] = {key: run.ranks[int(key[0])].host for key in tested if len(key) == 1}
    ranks = [test for test in guilty if test.key in hosts]
    slow_hosts = {hosts[test.key] for test in ranks}
    for host in sorted(slow_hosts):
        mine = [test for test in ranks if hosts[test.key] == host]
        judged = list(hosts.values()).count(host)
        if len(mine) == judged > 1:
            yield _suspect(mine, "host", host, len(tests))
            continue
        alone = f"{host} has no other rank: it may be the host" if judged == 1 else ""
        for test in mine:
            yield _suspect([test], "rank", f"{test.key[0]} on {host}", len(tests), alone)
    flows = [test for test in guilty if test.cause == "lossy"]
    if not flows:
        most = max((test.factor for test in guilty), default=1.0) ** COUPLED
        flows = [test for test in guilty if test not in ranks and test.factor >= most]
        flows = [test for test in flows if not slow_hosts & set(map(run.node_of, test.key))]
    judged_flows = tested - set(hosts)
    for end, way in ((0, "sends"), (1, "receives")):
        for port in sorted({test.key[end] for test in flows if test.key[end]}):
            mine = [test for test in flows if test.key[end] == port]
            own = sum(key[end] == port for key in judged_flows)
            if (len(mine) == own > 1 and own < len(judged_flows)) or not all(mine[0].key):
                flows = [test for test in flows if test not in mine]
                yield _suspect(mine, "NIC", f"{port}, what it {way}", len(tests))
    for test in flows:
        yield _suspect([test], "link", " to ".join(test.key), len(tests))


def _suspect(tests: Sequence[Suspect], kind: str, name: str, count: int, note: str = "") -> Suspect:
    """One name for tests that all must hold: the weakest of them counts."""
    weakest = max(tests, key=lambda test: (test.chance, test.key))
    sure = 1.0 - min(1.0, weakest.chance * count)
    factor = float(np.median([test.factor for test in tests]))
    note = note or weakest.note
    return replace(weakest, kind=kind, name=name, factor=factor, confidence=sure, note=note)


# ---- beside the plan


def _carried(records: Sequence[Record], run: Run, steps: int) -> Iterator[tuple[str, float, float]]:
    """Bytes of the flows of a step beside the ledger's, where timers say how many steps."""
    inputs, found = run.result.inputs, dict[segments.LinkName, float]()
    for each in records if steps else ():
        if each.source and each.target and each.bytes is not None:
            one, two = (run.islands[run.node_of(end)].name for end in each.flow[:2])
            link = segments.between_islands(one, two)
            if one == two:
                link = segments.island_link(one, segments.LinkScope.ISLAND)
            found[link] = found.get(link, 0.0) + each.bytes
    if found:
        planned = ledger(run.result.plan, inputs.model, inputs.cluster, inputs.job)
        for link, size in sorted(found.items()):
            yield str(link), size / steps, planned.over(link)
