"""What could be bought for a cluster: nodes, wider links, swaps; a file of them with prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hetplan.cluster.hosts import part_left
from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.energy.energy import hourly_price
from hetplan.drafting.changed import with_gained
from hetplan.drafting.words import BetweenWords, between_words, nodes_words
from hetplan.errors import Fault, InputError
from hetplan.files.quantities import FileForm, HourlyPrice
from hetplan.files.reading import decode, read_document
from hetplan.whatif.advise import Candidate
from hetplan.whatif.ask import pairs_between, relinked

CANDIDATES_SCHEMA = "hetplan.candidates/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateForm(FileForm):
    """One thing that could be had: nodes, a link, or both."""

    nodes: str | None = None
    """As in `2x8 h100 @A`, of a region of the cluster."""
    link: str | None = None
    """As in `A B 100Gbit 2ms`: two regions, or two islands, and what their link becomes."""
    without: list[str] = field(default_factory=list)
    """Names of nodes that go in exchange."""
    price: HourlyPrice | None = None
    """Of what comes, for one hour; the cluster file's price of nodes that go is taken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatesForm(FileForm):
    """A file of candidates."""

    candidates: list[CandidateForm]


def load_candidates(path: Path, cluster: Cluster) -> tuple[Candidate, ...]:
    """The candidates of a file; one InputError with every one that the cluster cannot have."""
    document = read_document(path)
    form = decode(document, CandidatesForm, schema=CANDIDATES_SCHEMA)
    found: dict[str, Candidate] = {}
    faults: list[Fault] = []
    for at, each in enumerate(form.candidates):
        try:
            candidate = _candidate(each, cluster)
        except InputError as error:
            faults += (
                document.fault(("candidates", at), ": ".join(filter(None, (f.field, f.message))))
                for f in error.faults
            )
            continue
        if candidate.words in found:
            faults.append(document.fault(("candidates", at), f"{candidate.words} is there twice"))
        found[candidate.words] = candidate
    if not form.candidates:
        faults.append(document.fault(("candidates",), "names none; give at least one"))
    if faults:
        raise InputError(*faults)
    return tuple(found.values())


def _candidate(form: CandidateForm, cluster: Cluster) -> Candidate:
    if form.nodes is None and form.link is None:
        raise InputError("has neither nodes nor link: say what could be had")
    changed, more = cluster, None
    if form.without:
        changed = part_left(changed, form.without)
    if form.nodes is not None:
        more = partial(_times, changed, form.nodes)
        changed = with_gained(changed, [form.nodes])
    if form.link is not None:
        changed = _relinked(changed, between_words(form.link))
    if form.link is not None or form.without:
        more = None
    words, usd = "; ".join(_words(form)), form.price
    if usd is not None and form.without:
        left = part_left(cluster, form.without)
        for was in cluster.islands:
            gone = was.num_usable_devices - left.island(was.name).num_usable_devices
            usd -= gone * (hourly_price(cluster, was) or 0.0)
    return Candidate(words=words, cluster=changed, usd_per_hour=usd, more=more)


def _times(cluster: Cluster, text: str, times: int) -> Cluster:
    """The cluster with so many times these nodes."""
    nodes = nodes_words(text).nodes
    return with_gained(cluster, [text.strip().replace(str(nodes), str(times * nodes), 1)])


def _words(form: CandidateForm) -> Iterator[str]:
    if form.nodes is not None:
        yield form.nodes
    if form.link is not None:
        yield form.link
    if form.without:
        yield f"without {', '.join(form.without)}"


def _relinked(cluster: Cluster, words: BetweenWords) -> Cluster:
    ends = words.ends
    islands = {island.name for island in cluster.islands}
    if ends is None or not (set(ends) <= islands or set(ends) <= set(cluster.regions)):
        known = ", ".join([*cluster.regions, *sorted(islands)])
        raise InputError(f"{words.text[:60]!a}: name two regions or two islands of: {known}")
    pairs = [ends] if set(ends) <= islands else pairs_between(cluster, ends)
    return relinked(cluster, pairs, partial(_as_said, words=words))


def _as_said(link: Link, words: BetweenWords) -> Link:
    rate = words.bytes_per_second
    return replace(
        link,
        bandwidth_bytes_per_second=rate,
        shared_bandwidth_bytes_per_second=None if words.each else rate,
        latency_seconds=words.round_trip_seconds / 2,
        samples=None,
    )
