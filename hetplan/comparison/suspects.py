"""Who makes a run slow: the host, rank, NIC or link that stands out from its like.

Telemetry is cut into blocks of `BLOCK` windows: a window is a step for ranks, and for flows as
long as most of their records. In window w a suspect i has a figure

    ranks    y_iw = log(compute seconds / the plan's prediction of them)
    flows    y_iw = log(busy seconds / bytes)

and an excess x_iw = y_iw less the median of y over its like. Like a rank are ranks of equal work on
other hosts, else on its own, else of its kind, where half of the plan's interval is added to L.
Like a flow are flows over links of equal figures that carry up to twice as much or half; one
without its like is held against its link's own rate, where it carries enough for the round trip not
to matter. No figure counts waiting for a partner.

A suspect is slow where x_iw > L in more windows than chance explains. L is the larger of log(1.15)
and 3/4 of the spread (1.4826 times the median absolute deviation of x from each one's own median).
Where x is normal an innocent is above that in 23 of 100 windows; 1/4 is granted. So with h of n
windows above L

    p_i = P(Binomial(n, 1/4) >= h)

A flow is lossy by the same test: windows in which 0.1 % of the bytes or more were sent again,
against the share of such windows of its like, at least 1/10. In the k-th block i is accused where
p_i times the tests of the block is at most 0.05 * 6 / (pi k)^2: over all blocks of a run chance
accuses an innocent in less than 5 of 100 runs, as far as windows are independent. Confidence is
1 - p_i times the tests.

All ranks of a host (two or more) are the host; all flows of a port to or from several others are
its NIC. Where a flow is lossy, or much slower than others, or ranks are, the others wait for it:
flows of a host with slow ranks are not accused of slowness, nor those less than 2/3 as slow (in
logarithms) as the slowest, nor any while one is lossy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pandas
from numpy.typing import NDArray

from hetplan.cluster.spec import Link
from hetplan.comparison.telemetry import Run
from hetplan.cost.network.segments import (
    LinkName,
    LinkScope,
    between_islands,
    island_link,
    shared_bytes_per_second,
)
from hetplan.cost.traffic import ledger
from hetplan.errors import printable
from hetplan.runtime.telemetry import COMPUTE, Record
from hetplan.units import counted, format_bytes

SCHEMA = "hetplan.suspects/1"
BLOCK, LEAST_WINDOWS = 20, 8  # 14 of 20 accuse one of 20 suspects; of less than 8 nobody is judged
MARGIN, SPREADS = math.log(1.15), 0.75  # devices of a kind differ by some percent
LEVEL, GRANTED = 0.05, 0.25
LOSS_GRANTED, LOSS_SHARE = 0.1, 1e-3  # 0.1 % of bytes sent again halves a long connection's rate
LEAST_BYTES = 65_536  # less says how long a message takes, not how fast the link is
COUPLED = 2 / 3  # part of the largest log(factor): what goes round a ring trickles everywhere
ALONE_MARGIN = math.log(2.0)  # headers, slow starts and sharing of a link
LONG_TRANSFER = 10.0  # times what is under way in a round trip, which is then a tenth of the time

Array: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[str, ...]
"""Of a rank: host, number; of a flow: source, its NIC, target, its NIC; of a port two are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Who was tested in one block of windows, and what was found."""

    kind: str = ""
    """`host`, `rank`, `NIC` or `link`."""
    name: str = ""
    key: Key
    cause: str
    """`slow`, or of a link or NIC `lossy`."""
    factor: float
    """Times as long as its like in the median window; of a lossy one the share sent again."""
    hits: int
    """Windows in which it stands out."""
    windows: int
    first: int
    """First window of the block: a step, or for flows a number of windows since the begin."""
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
            f"of {counted(self.windows, window)} from {window} {self.first} on (confidence "
            f"{sure:.2f} %)" + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Bytes of a step over all links of one name, both ways."""

    link: str
    measured_bytes: float
    planned_bytes: float


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
    carried: tuple[Carried, ...]

    @property
    def lines(self) -> Iterator[str]:
        """For a person, most important first."""
        yield from [each.line for each in self.suspects] or ["nobody stands out"]
        left = f"; not {self.not_judged} others: no like, few windows or few bytes"
        yield (
            f"judged: {counted(self.ranks, 'rank')}, {counted(self.flows, 'flow')}"
            + (left if self.not_judged else "")
        )
        for each in self.carried:
            sizes = (format_bytes(each.measured_bytes), format_bytes(each.planned_bytes))
            yield f"{printable(each.link)}: {sizes[0]} a step, the plan counts {sizes[1]}"


def judge(records: Sequence[Record], run: Run, *, blocks_before: int = 0) -> Verdict:
    """Who stands out in telemetry that belongs to the run (`read_telemetry`).

    `blocks_before` were judged earlier: the later a block, the more it takes to accuse somebody.
    """
    compute, flows = _compute(records), _flows(records)
    found: dict[tuple[str, str, str], Suspect] = {}
    judged: set[Key] = set()
    ranks, links = _blocks(compute), _blocks(flows)
    for at in range(max(len(ranks), len(links))):
        tests = [test for block in ranks[at : at + 1] for test in _rank_tests(block, run)]
        tests += [test for block in links[at : at + 1] for test in _flow_tests(block, run)]
        judged |= {test.key for test in tests}
        level = LEVEL * 6 / (math.pi * (blocks_before + at + 1)) ** 2 / max(1, len(tests))
        for suspect in _named([test for test in tests if test.chance <= level], tests):
            known = found.setdefault((suspect.kind, suspect.name, suspect.cause), suspect)
            if known.chance > suspect.chance:
                found[suspect.kind, suspect.name, suspect.cause] = suspect
    everyone = len(compute.columns) + len({tuple(key[1:]) for key in flows.index})
    num_ranks = sum(len(key) == 2 for key in judged)
    return Verdict(
        suspects=tuple(sorted(found.values(), key=lambda each: (each.chance, each.name))),
        ranks=num_ranks,
        flows=len(judged) - num_ranks,
        not_judged=everyone - len(judged),
        carried=tuple(_carried(records, run, len(compute))),
    )


# ---- figures of windows


def _compute(records: Sequence[Record]) -> pandas.DataFrame:
    """Seconds of compute by step and rank; of a step that was done again the last ones."""
    rows = {(each.step, each.rank): each.seconds for each in records if each.part == COMPUTE}
    return pandas.Series(rows, dtype=float).unstack().sort_index() if rows else pandas.DataFrame()


def _flows(records: Sequence[Record]) -> pandas.DataFrame:
    """Bytes, busy seconds and bytes sent again by window and flow."""
    sent = [each for each in records if each.bytes is not None]
    if not sent:
        return pandas.DataFrame()
    width = float(np.median([each.window_seconds for each in sent]))
    middles = np.array([each.begin_seconds + each.window_seconds / 2 for each in sent])
    windows = ((middles - middles.min()) // width).astype(int)
    rows = [
        [
            *("" if end is None else str(end) for end in each.flow[:4]),
            *(each.bytes, each.busy_seconds, each.resent_bytes),
        ]
        for each in sent
    ]
    names = ["source", "out", "target", "into", "bytes", "busy", "resent"]
    frame = pandas.DataFrame(rows, columns=names).astype(dict.fromkeys(names[4:], float))
    return frame.assign(window=windows).groupby(["window", *names[:4]]).sum(min_count=1)


def _blocks(frame: pandas.DataFrame) -> list[pandas.DataFrame]:
    """Rows of so many windows each; the last block has the rest too, where that is little."""
    windows = frame.index.get_level_values(0)
    order = np.unique(windows)
    count = max(len(order) > 0, (len(order) + BLOCK - LEAST_WINDOWS) // BLOCK)
    block_of = np.minimum(np.arange(len(order)) // BLOCK, count - 1)
    return [frame[windows.isin(order[block_of == at])] for at in range(count)]


# ---- tests


def _test(
    key: Key, cause: str, factor: float, first: int, stands_out: Array, share: float
) -> Suspect:
    """A suspect, and the chance that an innocent stands out in as many of the windows."""
    from scipy.special import bdtrc

    hits, count = int(stands_out.sum()), len(stands_out)
    chance = float(bdtrc(hits - 1, count, share))  # P(Binomial(count, share) >= hits)
    return Suspect(
        key=key, cause=cause, factor=factor, hits=hits, windows=count, first=first, chance=chance
    )


def _log(values: Array) -> Array:
    with np.errstate(all="ignore"):
        found = np.log(values)
    return np.where(np.isfinite(found), found, math.nan)


def _median(values: Array, axis: int | None = None) -> Array:
    """Of what is known; nan where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis))


def _excess(figures: Array, like: Sequence[list[int]]) -> tuple[Array, float]:
    """Each column less the median of its like, window by window, and the margin by their spread."""
    found = np.full_like(figures, math.nan)
    for column, others in enumerate(like):
        middle = _median(figures[:, others], axis=1)
        # Where none of the like has the window, their usual figure.
        found[:, column] = figures[:, column] - np.where(np.isnan(middle), _median(middle), middle)
    spread = 1.4826 * float(_median(np.abs(found - _median(found, axis=0))))
    return found, max(MARGIN, SPREADS * spread)


def _slow(key: Key, excess: Array, first: int, margin: float, note: str = "") -> Iterator[Suspect]:
    known = excess[np.isfinite(excess)]
    if len(known) >= LEAST_WINDOWS:
        factor, above = math.exp(float(np.median(known))), np.where(known > margin, 1.0, 0.0)
        yield replace(_test(key, "slow", factor, first, above, GRANTED), note=note)


def _rank_tests(block: pandas.DataFrame, run: Run) -> Iterator[Suspect]:
    ranks, like, extra = [run.ranks[int(rank)] for rank in block.columns], [], []
    interval = run.result.estimate.interval
    for own in ranks:
        equal = [at for at, one in enumerate(ranks) if one.work == own.work and one is not own]
        away = [at for at in equal if ranks[at].host != own.host]
        kind = [at for at, one in enumerate(ranks) if one.kind == own.kind and one.host != own.host]
        like.append(away or equal or kind)
        extra.append(0.0 if equal else math.log(interval.p90_seconds / interval.p10_seconds) / 2)
    predicted = np.array([each.compute_seconds or math.nan for each in ranks])
    excess, margin = _excess(_log(block.to_numpy(dtype=float) / predicted), like)
    for at, own in enumerate(ranks):
        note = "nobody does equal work: by the plan's prediction" if extra[at] else ""
        key, first = (own.host, str(own.rank)), int(block.index[0])
        yield from _slow(key, excess[:, at], first, margin + extra[at], note)


def _flow_tests(block: pandas.DataFrame, run: Run) -> Iterator[Suspect]:
    wide = block.unstack([1, 2, 3, 4])
    sent, busy, resent = (wide[name].to_numpy(dtype=float) for name in ("bytes", "busy", "resent"))
    keys: list[Key] = list(wide["bytes"].columns)
    whole, first = np.nansum(sent, axis=0), int(wide.index[0])
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
            shared = shared_bytes_per_second(link) / links.count(links[at])
            rate = min(link.bandwidth_bytes_per_second * devices, shared)
            if _median(sent[:, at]) >= LONG_TRANSFER * rate * 2 * link.latency_seconds:
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
    one, two = run.islands.get(key[0]), run.islands.get(key[2])
    if one and two:
        link = run.result.inputs.cluster.link_between(one.name, two.name)
        return link, min(one.devices_per_node, two.devices_per_node), ""
    return None, 0, f"out of {one.name}" if one else f"into {two.name if two else ''}"


# ---- names


def _named(guilty: Sequence[Suspect], tests: Sequence[Suspect]) -> Iterator[Suspect]:
    """The fewest names that explain what was found in one block."""
    ranks = [test for test in guilty if len(test.key) == 2]
    slow_hosts = {test.key[0] for test in ranks}
    for host in sorted(slow_hosts):
        mine = [test for test in ranks if test.key[0] == host]
        judged = sum(test.key[0] == host and len(test.key) == 2 for test in tests)
        if len(mine) == judged > 1:
            yield _suspect(mine, "host", host, len(tests))
            continue
        alone = f"{host} has no other rank: it may be the host" if judged == 1 else ""
        for test in mine:
            yield _suspect([test], "rank", f"{test.key[1]} on {host}", len(tests), alone)
    flows = [test for test in guilty if test.cause == "lossy"]
    if not flows:
        most = max((test.factor for test in guilty), default=1.0) ** COUPLED
        flows = [test for test in guilty if test not in ranks and test.factor >= most]
        flows = [test for test in flows if not slow_hosts & {test.key[0], test.key[2]}]
    yield from _named_flows(flows, {each.key for each in tests if len(each.key) == 4}, tests)


def _named_flows(
    guilty: list[Suspect], judged: set[Key], tests: Sequence[Suspect]
) -> Iterator[Suspect]:
    """Ports of which all flows are guilty, then the links that are left."""
    for end, way in ((slice(0, 2), "sends"), (slice(2, 4), "receives")):
        for port in sorted({test.key[end] for test in guilty if test.key[end][0]}):
            mine = [test for test in guilty if test.key[end] == port]
            own = sum(key[end] == port for key in judged)
            if (len(mine) == own > 1 and own < len(judged)) or not all(mine[0].key[::2]):
                guilty = [test for test in guilty if test not in mine]
                yield _suspect(mine, "NIC", f"{_end(port)}, what it {way}", len(tests))
    for test in guilty:
        name = f"{_end(test.key[:2])} to {_end(test.key[2:])}"
        yield _suspect([test], "link", name, len(tests))


def _end(port: Key) -> str:
    return f"{port[0]} NIC {port[1]}" if port[1] else port[0]


def _suspect(tests: Sequence[Suspect], kind: str, name: str, count: int, note: str = "") -> Suspect:
    """One name for tests that all must hold: the weakest of them counts."""
    weakest = max(tests, key=lambda test: (test.chance, test.key))
    sure = 1.0 - min(1.0, weakest.chance * count)
    factor = float(np.median([test.factor for test in tests]))
    note = note or weakest.note
    return replace(weakest, kind=kind, name=name, factor=factor, confidence=sure, note=note)


# ---- beside the plan


def _carried(records: Sequence[Record], run: Run, steps: int) -> Iterator[Carried]:
    """Bytes of the flows of a step beside the ledger's, where timers say how many steps."""
    inputs, found = run.result.inputs, dict[LinkName, float]()
    for each in records if steps else ():
        if each.source and each.target and each.bytes is not None:
            one, two = run.islands[each.source].name, run.islands[each.target].name
            link = island_link(one, LinkScope.ISLAND) if one == two else between_islands(one, two)
            found[link] = found.get(link, 0.0) + each.bytes
    if found:
        planned = ledger(run.result.plan, inputs.model, inputs.cluster, inputs.job)
        for link, size in sorted(found.items()):
            amount = planned.over(link)
            yield Carried(link=str(link), measured_bytes=size / steps, planned_bytes=amount)
