"""Who makes a run slow: the host, rank, NIC or link that stands out from its like.

The telemetry is cut into blocks of `BLOCK` windows: a window is a step for ranks, and for flows as
long as most of their records. In every window w each suspect i has a figure

    ranks    y_iw = log(compute seconds / the plan's prediction of them)
    flows    y_iw = log(busy seconds / bytes)

and an excess x_iw = y_iw less the median of y over its like. Like a rank are ranks of equal work on
other hosts, else on its own, else ranks of its kind, where what the plan does not know of them (its
interval) widens the margin. Like a flow are flows over links of equal figures that carry up to
twice as much or half. A flow without its like is held against the link's own rate, where it
carries enough for the round trip not to matter. Neither figure counts waiting for a partner.

Somebody is slow where x_iw > L in so many windows that chance does not explain it. L is the larger
of log(1.15) and the like's spread (1.4826 times the median absolute deviation of x from each
one's own median). An innocent is above one spread in a sixth of the windows where they are normal;
1/4 is granted. So with h of n windows above L

    p_i = P(Binomial(n, 1/4) >= h)        a flow is lossy by the same test: windows with bytes that
                                          were sent again, against the share of such windows of its
                                          like, at least 1/10

and i is accused where p_i times the number of tests is at most 0.05 * 6 / (pi k)^2 in the k-th
block: over all blocks of a run chance accuses an innocent in less than 5 of 100 runs, as far as
windows are independent. The confidence that is told is 1 - p_i times the tests of all blocks so
far. All ranks of a host (two or more) are the host; all flows of a node's port to or from several
others are its NIC. Flows of a host with slow ranks are only accused of loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import pandas
from numpy.typing import NDArray

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
BLOCK = 20
"""Windows that are judged together: 13 of them above the margin accuse one of 20 suspects."""
LEAST_WINDOWS = 8
"""Fewer in a block are not judged: all of them must stand out."""
MARGIN = math.log(1.15)
"""Slower than this is worth a person's time; ordinary devices of a kind differ by some percent."""
LEVEL, GRANTED, SPREADS = 0.05, 0.25, 0.75
COUPLED = 2 / 3
"""A flow that is less than so much slower, in logarithms, than the slowest one waits for it: what
goes round a ring trickles everywhere."""
LOSS_GRANTED, LOSS_SHARE = 0.1, 1e-3
"""Of windows, and of bytes sent again: 0.1 % loss halves a long connection's rate."""
LEAST_BYTES = 65_536
"""A window that carries less says how long a message takes, not how fast the link is."""
ALONE_MARGIN = math.log(2.0)
"""Of a flow without its like: headers, slow starts and sharing of a link cost that much."""
LONG_TRANSFER = 10.0
"""Times what is under way in a round trip: then the round trip is a tenth of the time."""

Array: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[str, str, str, str]
"""A flow: source, its NIC, target, its NIC; of a port two of them are empty."""


class SuspectKind(StrEnum):
    """What stands out."""

    HOST = "host"
    RANK = "rank"
    NIC = "NIC"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Who stands out in one block of windows, and why."""

    kind: SuspectKind
    name: str
    cause: str
    """`slow`, or of a link or NIC `lossy`."""
    factor: float
    """Times as long as its like in the median window; of a lossy one the share sent again."""
    hits: int
    """Windows in which it stands out."""
    windows: int
    first: int
    """First window of the block: a step, or for flows a number of windows since the begin."""
    confidence: float
    """1 - the chance that an innocent among all that was tested stands out in as many windows."""
    note: str = ""

    @property
    def line(self) -> str:
        """In one line, for a person."""
        what = f"{self.cause} {self.kind}: {printable(self.name)}"
        if self.cause == "lossy":
            how = f"sends {self.factor:.1%} of its bytes again"
        else:
            how = f"takes {self.factor:.2f} times as long as its like"
        window = "step" if self.kind in (SuspectKind.HOST, SuspectKind.RANK) else "window"
        return (
            f"{what} {how}; it stands out in {self.hits} of {counted(self.windows, window)} from "
            f"{self.first} on (confidence {math.floor(self.confidence * 1e4) / 1e2:.2f} %)"
            + (f"; {self.note}" if self.note else "")
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
    """The surest block of each."""
    ranks: int
    """Ranks that could be judged, in some block."""
    flows: int
    steps: int
    windows: int
    carried: tuple[Carried, ...]
    notes: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """For a person, most important first."""
        found = [each.line for each in self.suspects] or ["nobody stands out"]
        judged = (
            f"judged: {counted(self.ranks, 'rank')} over {counted(self.steps, 'step')}, "
            f"{counted(self.flows, 'flow')} over {counted(self.windows, 'window')}"
        )
        traffic = [
            f"{each.link}: {format_bytes(each.measured_bytes)} a step, the plan counts "
            f"{format_bytes(each.planned_bytes)}"
            for each in self.carried
        ]
        return (*found, judged, *traffic, *self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One suspect in one block before it is accused."""

    kind: SuspectKind
    key: int | Key
    cause: str
    factor: float
    hits: int
    windows: int
    first: int
    chance: float
    note: str = ""
    host: str = ""
    """Of a rank; empty: it is a flow."""

    @property
    def flow(self) -> Key:
        """Of a flow; empty texts for a rank."""
        return self.key if isinstance(self.key, tuple) else _NO_FLOW


_NO_FLOW = ("", "", "", "")


def judge(records: Sequence[Record], run: Run) -> Verdict:
    """Who stands out in the telemetry of a run, which has been checked (`read_telemetry`)."""
    compute, flows = _compute(records), _flows(records)
    found: dict[tuple[str, str], Suspect] = {}
    judged: set[int | Key] = set()
    tested = 0
    ranks, links = _blocks(compute), _blocks(flows)
    for at in range(max(len(ranks), len(links))):
        tests = list(_rank_tests(ranks[at], run)) if at < len(ranks) else []
        tests += _flow_tests(links[at], run) if at < len(links) else []
        tested += len(tests)
        level = LEVEL * 6 / (math.pi * (at + 1)) ** 2 / max(1, len(tests))
        guilty = [test for test in tests if test.chance <= level]
        judged |= {test.key for test in tests}
        for suspect in _named(guilty, tests, tested):
            known = found.get((suspect.kind, suspect.name))
            if known is None or known.confidence < suspect.confidence:
                found[suspect.kind, suspect.name] = suspect
    return Verdict(
        suspects=tuple(sorted(found.values(), key=lambda each: (-each.confidence, each.name))),
        ranks=sum(isinstance(key, int) for key in judged),
        flows=sum(not isinstance(key, int) for key in judged),
        steps=len(compute),
        windows=len(set(flows.index.get_level_values(0))),
        carried=tuple(_carried(records, run, len(compute))),
        notes=tuple(_notes(compute, flows, judged)),
    )


# ---- figures of windows


def _compute(records: Iterable[Record]) -> pandas.DataFrame:
    """Seconds of compute by step and rank."""
    rows = [(each.step, each.rank, each.seconds) for each in records if each.part == COMPUTE]
    frame = pandas.DataFrame(rows, columns=["step", "rank", "seconds"])
    return frame.pivot(index="step", columns="rank", values="seconds").sort_index()


def _flows(records: Iterable[Record]) -> pandas.DataFrame:
    """Bytes, busy seconds and bytes sent again by window and flow."""
    sent = [each for each in records if each.bytes is not None]
    if not sent:
        return pandas.DataFrame(columns=["bytes", "busy", "resent"])
    width = float(np.median([each.window_seconds for each in sent]))
    begin = min(each.begin_seconds + each.window_seconds / 2 for each in sent)
    rows = [
        (
            int((each.begin_seconds + each.window_seconds / 2 - begin) / width),
            *_key(each),
            each.bytes,
            math.nan if each.busy_seconds is None else each.busy_seconds,
            math.nan if each.resent_bytes is None else each.resent_bytes,
        )
        for each in sent
    ]
    names = ["window", "source", "out", "target", "into", "bytes", "busy", "resent"]
    frame = pandas.DataFrame(rows, columns=names)
    return frame.groupby(names[:5], sort=True).sum(min_count=1)


def _key(record: Record) -> Key:
    out, into = (
        "" if each is None else str(each) for each in (record.source_nic, record.target_nic)
    )
    return (record.source, out, record.target, into)


def _blocks(frame: pandas.DataFrame) -> list[pandas.DataFrame]:
    """Rows of so many windows each; the last block has the rest, where that is enough."""
    windows = frame.index.get_level_values(0)
    order = sorted(set(windows))
    starts = list(range(0, len(order), BLOCK))
    if len(starts) > 1 and len(order) - starts[-1] < LEAST_WINDOWS:
        starts.pop()
    ends = [*starts[1:], len(order)]
    return [frame[windows.isin(order[start:end])] for start, end in zip(starts, ends, strict=True)]


# ---- tests


def _tail(hits: int, windows: int, share: float) -> float:
    """P(Binomial(windows, share) >= hits)."""
    return math.fsum(
        math.comb(windows, each) * share**each * (1 - share) ** (windows - each)
        for each in range(hits, windows + 1)
    )


def _spread(excess: Array) -> float:
    """Of windows around each one's own median, which a slow one does not widen."""
    apart = excess - np.nanmedian(excess, axis=0)
    found = apart[np.isfinite(apart)]
    return 1.4826 * float(np.median(np.abs(found))) if found.size else 0.0


def _excess(figures: Array, like: Sequence[Sequence[int]]) -> Array:
    """Each column less the median of its like, window by window; of nobody's like nan."""
    found = np.full_like(figures, math.nan)
    for column, others in enumerate(like):
        if others:
            middle = _medians(figures[:, others])
            found[:, column] = figures[:, column] - middle
    return found


def _medians(figures: Array) -> Array:
    """Of each row; where a row has none that of all of them."""
    middle = np.full(len(figures), math.nan)
    known = np.isfinite(figures).any(axis=1)
    if known.any():
        middle[known] = np.nanmedian(figures[known], axis=1)
        middle[~known] = np.nanmedian(middle[known])
    return middle


def _slow(
    kind: SuspectKind, key: int | Key, excess: Array, margin: float, first: int, note: str = ""
) -> Iterator[_Test]:
    known = excess[np.isfinite(excess)]
    if len(known) >= LEAST_WINDOWS:
        hits = int((known > margin).sum())
        yield _Test(
            kind=kind,
            key=key,
            cause="slow",
            factor=math.exp(float(np.median(known))),
            hits=hits,
            windows=len(known),
            first=first,
            chance=_tail(hits, len(known), GRANTED),
            note=note,
        )


def _rank_tests(block: pandas.DataFrame, run: Run) -> Iterator[_Test]:
    ranks = [run.ranks[rank] for rank in block.columns]
    predicted = np.array([each.compute_seconds or 1.0 for each in ranks])
    with np.errstate(divide="ignore"):
        figures = np.log(block.to_numpy(dtype=float) / predicted)
    figures[~np.isfinite(figures)] = math.nan
    interval = run.result.estimate.interval
    doubt = math.log(interval.p90_seconds / interval.p10_seconds) / 2
    like: list[list[int]] = []
    unsure: list[bool] = []
    for own in ranks:
        equal = [at for at, each in enumerate(ranks) if each.work == own.work and each is not own]
        away = [at for at in equal if ranks[at].host != own.host]
        kind = [
            at
            for at, each in enumerate(ranks)
            if each.kind == own.kind and each.host != own.host and each.compute_seconds
        ]
        like.append(away or equal or kind)
        unsure.append(not away and not equal)
    excess = _excess(figures, like)
    spread = _spread(excess)
    for at, own in enumerate(ranks):
        margin = max(MARGIN, SPREADS * spread) + (doubt if unsure[at] else 0.0)
        note = "nobody does equal work: by the plan's prediction" if unsure[at] else ""
        for test in _slow(
            SuspectKind.RANK, own.rank, excess[:, at], margin, int(block.index[0]), note
        ):
            yield replace(test, host=own.host)


def _flow_tests(block: pandas.DataFrame, run: Run) -> Iterator[_Test]:
    wide = block.unstack([1, 2, 3, 4])
    keys: list[Key] = list(wide["bytes"].columns)
    sent, busy, resent = (wide[name].to_numpy(dtype=float) for name in ("bytes", "busy", "resent"))
    whole, first = np.nansum(sent, axis=0), int(wide.index[0])
    like = [
        [
            at
            for at, other in enumerate(keys)
            if other != key
            and _figures_of(run, other) == _figures_of(run, key)
            and whole[own] / 2 <= whole[at] <= whole[own] * 2
        ]
        for own, key in enumerate(keys)
    ]
    figures = _flow_figures(sent, busy)
    excess = _excess(figures, like)
    spread = _spread(excess)
    for at, key in enumerate(keys):
        kind = SuspectKind.LINK if key[0] and key[2] else SuspectKind.NIC
        margin, note, own = max(MARGIN, SPREADS * spread), "", excess[:, at]
        if not like[at] and kind is SuspectKind.LINK:
            margin, note = ALONE_MARGIN, "nothing is like it: by the link's own rate"
            own = figures[:, at] - _alone(run, keys, at, sent[:, at])
        if np.isnan(busy[:, at]).all():
            note = "its busy time is not known: by its fullest windows"
        elif np.isnan(resent[:, at]).all():
            note = "shaped or lossy cannot be told apart"
        yield from _slow(kind, key, own, margin, first, note)
        yield from _lossy(kind, at, keys, sent, resent, like[at], first)


def _flow_figures(sent: Array, busy: Array) -> Array:
    """log(busy seconds / bytes) of windows that carry enough. Where busy time is not known it is
    the whole window, of the fullest quarter of the windows: nobody is judged by a pause.
    """
    carried = np.where(sent >= LEAST_BYTES, sent, math.nan)
    figures = np.full_like(sent, math.nan)
    for at in range(sent.shape[1]):
        own = carried[:, at]
        if np.isfinite(busy[:, at]).any():
            with np.errstate(divide="ignore", invalid="ignore"):
                figures[:, at] = np.log(busy[:, at] / own)
        elif np.isfinite(own).any():
            full = own >= np.nanquantile(own, 0.75)
            figures[full, at] = -np.log(own[full])
    figures[~np.isfinite(figures)] = math.nan
    return figures


def _figures_of(run: Run, key: Key) -> tuple[object, ...]:
    """What links have in common on which flows go alike."""
    one, two = (run.islands.get(node) for node in (key[0], key[2]))
    if one is None or two is None:
        port = one or two
        return ("out" if one else "in", port.name if port else "")
    link = run.result.inputs.cluster.link_between(one.name, two.name)
    shared = shared_bytes_per_second(link)
    return (
        one is two,
        link.bandwidth_bytes_per_second,
        shared,
        link.latency_seconds,
        one.devices_per_node,
        two.devices_per_node,
    )


def _alone(run: Run, keys: Sequence[Key], at: int, sent: Array) -> float:
    """log(seconds per byte) of the link of a flow; nan where it carries too little to tell."""
    one, two = run.islands[keys[at][0]], run.islands[keys[at][2]]
    link = run.result.inputs.cluster.link_between(one.name, two.name)
    across = sum(run.islands.get(key[0]) is one and run.islands.get(key[2]) is two for key in keys)
    devices = min(one.devices_per_node, two.devices_per_node)
    rate = min(link.bandwidth_bytes_per_second * devices, shared_bytes_per_second(link) / across)
    under_way = rate * 2 * link.latency_seconds
    enough = float(np.nanmedian(sent)) >= LONG_TRANSFER * under_way
    return -math.log(rate) if enough else math.nan


def _lossy(
    kind: SuspectKind,
    at: int,
    keys: Sequence[Key],
    sent: Array,
    resent: Array,
    like: Sequence[int],
    first: int,
) -> Iterator[_Test]:
    known = np.isfinite(resent[:, at])
    if known.sum() < LEAST_WINDOWS:
        return
    others = resent[:, like]
    others = others[np.isfinite(others)]
    granted = max(LOSS_GRANTED, float((others > 0).mean()) if others.size else 0.0)
    hits = int((resent[known, at] > 0).sum())
    share = float(np.nansum(resent[:, at]) / max(1.0, np.nansum(sent[:, at])))
    yield _Test(
        kind=kind,
        key=keys[at],
        cause="lossy",
        factor=share,
        hits=hits,
        windows=int(known.sum()),
        first=first,
        chance=_tail(hits, int(known.sum()), granted) if share >= LOSS_SHARE else 1.0,
    )


# ---- names


def _named(guilty: Sequence[_Test], tests: Sequence[_Test], tested: int) -> Iterator[Suspect]:
    """The fewest names that explain what was found in one block."""
    slow_hosts = {test.host for test in guilty if test.host}
    for host in sorted(slow_hosts):
        mine = [test for test in guilty if test.host == host]
        judged = sum(test.host == host for test in tests)
        if len(mine) == judged > 1:
            yield _suspect(mine, SuspectKind.HOST, host, tested)
            continue
        alone = f"{host} has no other rank: it may be the host" if judged == 1 else ""
        for test in mine:
            yield _suspect([test], SuspectKind.RANK, f"{test.key} on {host}", tested, alone)
    lossy = {test.flow for test in guilty if test.cause == "lossy"}
    for cause in ("lossy", "slow"):
        flows = [
            test
            for test in guilty
            if test.flow != _NO_FLOW
            and test.cause == cause
            and (
                cause == "lossy"
                or not (test.flow in lossy or slow_hosts & {test.flow[0], test.flow[2]})
            )
        ]
        most = max((test.factor for test in flows if cause == "slow"), default=1.0)
        flows = [test for test in flows if cause == "lossy" or test.factor >= most**COUPLED]
        like = [test for test in tests if test.flow != _NO_FLOW and test.cause == cause]
        yield from _named_flows(flows, like, tested)


def _named_flows(guilty: list[_Test], tests: Sequence[_Test], tested: int) -> Iterator[Suspect]:
    """Ports of which all flows are guilty, then the links that are left."""
    for end, way in ((slice(0, 2), "sends"), (slice(2, 4), "receives")):
        for port in sorted({test.flow[end] for test in guilty}):
            mine = [test for test in guilty if test.flow[end] == port]
            judged = sum(test.flow[end] == port for test in tests)
            both = all(test.kind is SuspectKind.LINK for test in mine)
            if both and len(mine) == judged > 1 and judged < len(tests):
                guilty = [test for test in guilty if test not in mine]
                yield _suspect(mine, SuspectKind.NIC, f"{_end(port)}, what it {way}", tested)
    for test in guilty:
        source, target = test.flow[:2], test.flow[2:]
        if test.kind is SuspectKind.LINK:
            name = f"{_end(source)} to {_end(target)}"
        else:
            sends = bool(source[0])
            way = "sends" if sends else "receives"
            name = f"{_end(source if sends else target)}, what it {way}"
        yield _suspect([test], test.kind, name, tested, test.note)


def _end(port: tuple[str, ...]) -> str:
    return f"{port[0]} NIC {port[1]}" if port[1] else port[0]


def _suspect(
    tests: Sequence[_Test], kind: SuspectKind, name: str, tested: int, note: str = ""
) -> Suspect:
    """One name for several tests that all must hold: the weakest of them counts."""
    weakest = max(tests, key=lambda test: (test.chance, test.key))
    return Suspect(
        kind=kind,
        name=name,
        cause=weakest.cause,
        factor=float(np.median([test.factor for test in tests])),
        hits=weakest.hits,
        windows=weakest.windows,
        first=weakest.first,
        confidence=1.0 - min(1.0, weakest.chance * tested),
        note=note or weakest.note,
    )


# ---- beside the plan


def _carried(records: Sequence[Record], run: Run, steps: int) -> Iterator[Carried]:
    """Bytes of the flows beside the ledger's, of links that both know; nothing where no timer
    says how many steps there were.
    """
    if not steps:
        return
    inputs = run.result.inputs
    planned = ledger(run.result.plan, inputs.model, inputs.cluster, inputs.job)
    found: dict[LinkName, float] = {}
    for each in records:
        if each.source and each.target and each.bytes is not None:
            one, two = run.islands[each.source].name, run.islands[each.target].name
            link = island_link(one, LinkScope.ISLAND) if one == two else between_islands(one, two)
            found[link] = found.get(link, 0.0) + each.bytes
    for link, size in sorted(found.items()):
        yield Carried(link=str(link), measured_bytes=size / steps, planned_bytes=planned.over(link))


def _notes(compute: pandas.DataFrame, flows: pandas.DataFrame, judged: set[int | Key]) -> list[str]:
    notes = []
    if len(compute) < LEAST_WINDOWS and len(flows.index.unique(0)) < LEAST_WINDOWS:
        notes.append(f"too short: {LEAST_WINDOWS} windows or steps are needed to judge anybody")
        return notes
    alone = [str(rank) for rank in compute.columns if rank not in judged]
    if alone:
        notes.append(f"not judged, because nobody is like it: rank {', '.join(alone)}")
    keys = set(flows.index.droplevel(0)) if len(flows) else set()
    left = len(keys - judged)
    if left:
        notes.append(f"not judged: {counted(left, 'flow')} without its like, or of few bytes")
    return notes
