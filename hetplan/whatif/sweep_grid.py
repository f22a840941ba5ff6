"""Which questions does a sweep file stand for, and what is each of them?

Every list of the file (`hetplan.job.sweep_form`) is an axis; the grid is their product. All that
can be wrong before a plan is made is found before any is: files, names, links.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster, Link
from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, decode, read_document
from hetplan.job.load import load_job
from hetplan.job.sweep_form import SWEEP_SCHEMA, Backend, LinkAxis, SweepForm
from hetplan.model.load import load_model
from hetplan.plans.rules import some
from hetplan.search.result import Question
from hetplan.whatif.ask import pairs_between, relinked, with_nodes

MAX_POINTS = 100_000
"""Questions of one sweep; at a second each they take a day."""

_SHOWN, _LONGEST_NAME = 8, 200
"""Names that a fault lists, and characters of one."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """Another speed of one link."""

    between: tuple[str, str]
    bandwidth_bytes_per_second: float | None
    round_trip_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One question of the grid, by names and changes; small enough to send to a worker."""

    model: str
    """Path."""
    cluster: str
    job: str
    target: str | None
    global_batch_size: int | None
    sequence_length: int | None
    links: tuple[LinkChange, ...]
    nodes: tuple[tuple[str, int], ...]
    digest: str
    """Of the contents of the three files."""

    @property
    def key(self) -> str:
        """The same for the same question, whatever the sweep around it."""
        asked = (
            self.digest, self.target, self.global_batch_size, self.sequence_length, self.links,
            self.nodes,
        )  # fmt: skip
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every question and where they are asked."""

    points: tuple[Point, ...]
    backend: Backend
    workers: int | None


def load_sweep(path: Path) -> Sweep:
    """The sweep that the file describes; an InputError with every fault otherwise."""
    return read_sweep(read_document(path), path.parent)


def read_sweep(document: Document, folder: Path) -> Sweep:
    """The same of a document that was read; its files are named relative to the folder."""
    form = decode(document, SweepForm, schema=SWEEP_SCHEMA)
    counted = _count(form)
    if counted > MAX_POINTS:
        message = f"stands for {counted:,} questions; at most {MAX_POINTS:,}"
        raise InputError(document.fault((), message))
    faults: list[Fault] = []
    _read_all(document, "models", form.models, folder, load_model, faults)
    clusters = _read_all(document, "clusters", form.clusters, folder, load_cluster, faults)
    _read_all(document, "jobs", form.jobs, folder, load_job, faults)
    if not faults:
        faults += _axis_faults(document, form, clusters)
    if faults:
        raise InputError(*faults)
    points = tuple(dict.fromkeys(_points(form, folder)))
    return Sweep(points=points, backend=form.backend, workers=form.workers)


def _read_all(
    document: Document,
    key: str,
    names: list[str],
    folder: Path,
    load: Callable[[Path], _T],
    faults: list[Fault],
) -> list[_T]:
    """What could be read of the files; every fault of the others is added."""
    found = []
    for at, name in enumerate(names):
        file = folder / name
        if not os.path.isfile(file):  # also of names that no file can have
            shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
            message = f"there is no file {shown!a} in {str(folder)!a}" + (
                "; name it relative to this file" if document.file else ""
            )
            faults.append(document.fault((key, at), message))
            continue
        try:
            found.append(load(file))
        except InputError as error:
            faults.extend(error.faults)
    return found


def _axis_faults(document: Document, form: SweepForm, clusters: list[Cluster]) -> Iterator[Fault]:
    """Links and islands that are in none of the clusters, and links that change in nothing."""
    islands = {island.name for cluster in clusters for island in cluster.islands}
    places = islands | {region for cluster in clusters for region in cluster.regions}
    for at, link in enumerate(form.links):
        one, two = link.between
        for number, name in enumerate(link.between):
            if name not in places:
                known = some(sorted(places), _SHOWN)
                message = f"no cluster has an island or region {name}; there is {known}"
                yield document.fault(("links", at, "between", number), message)
        if one == two:
            message = f"{one} and {two} are one place; name two islands or two regions"
            yield document.fault(("links", at, "between"), message)
        if not link.bandwidth and not link.round_trip:
            yield document.fault(("links", at), "changes nothing; add bandwidth or round_trip")
    for at, axis in enumerate(form.nodes):
        if axis.island not in islands:
            known = some(sorted(islands), _SHOWN)
            message = f"no cluster has an island {axis.island}; there is {known}"
            yield document.fault(("nodes", at, "island"), message)


def _count(form: SweepForm) -> int:
    total = len(form.models) * len(form.clusters) * len(form.jobs)
    for values in (form.targets, form.global_batch_size, form.sequence_length):
        total *= max(1, len(values))
    for link in form.links:
        total *= max(1, len(link.bandwidth)) * max(1, len(link.round_trip))
    for nodes in form.nodes:
        total *= len(nodes.nodes)
    return total


def _points(form: SweepForm, folder: Path) -> Iterator[Point]:
    link_axes = [tuple(_link_changes(axis)) for axis in form.links]
    node_axes = [tuple((axis.island, count) for count in axis.nodes) for axis in form.nodes]
    digests = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in (*form.models, *form.clusters, *form.jobs)
    }
    for model, cluster, job in product(form.models, form.clusters, form.jobs):
        for target, batch, length in product(
            form.targets or (None,), form.global_batch_size or (None,),
            form.sequence_length or (None,),
        ):  # fmt: skip
            for links in product(*link_axes):
                for nodes in product(*node_axes):
                    yield Point(
                        model=str(folder / model),
                        cluster=str(folder / cluster),
                        job=str(folder / job),
                        target=target,
                        global_batch_size=batch,
                        sequence_length=length,
                        links=links,
                        nodes=nodes,
                        digest=digests[model] + digests[cluster] + digests[job],
                    )


def _link_changes(axis: LinkAxis) -> Iterator[LinkChange]:
    for bandwidth, round_trip in product(axis.bandwidth or (None,), axis.round_trip or (None,)):
        yield LinkChange(
            between=(axis.between[0], axis.between[1]),
            bandwidth_bytes_per_second=bandwidth,
            round_trip_seconds=round_trip,
        )


def question(point: Point) -> Question:
    """Read the files and make the changes; an InputError where one does not apply."""
    asked = Question(
        model=load_model(point.model),
        cluster=load_cluster(point.cluster),
        job=load_job(point.job),
    )
    for name, count in point.nodes:
        asked = with_nodes(asked, asked.cluster.island(name), count)
    for change in point.links:
        asked = asked.changed(cluster=_with_link(asked.cluster, change))
    changes = {
        name: getattr(point, name)
        for name in ("target", "global_batch_size", "sequence_length")
        if getattr(point, name) is not None
    }
    return asked.with_job(**changes)


def _with_link(cluster: Cluster, change: LinkChange) -> Cluster:
    one, two = change.between
    islands = {island.name for island in cluster.islands}
    if not {one, two} <= islands and {one, two} <= {*cluster.regions}:
        pairs = pairs_between(cluster, change.between)
    else:
        pairs = [(cluster.island(one).name, cluster.island(two).name)]
    return relinked(cluster, pairs, lambda link: _changed(link, change))


def _changed(link: Link, change: LinkChange) -> Link:
    if change.bandwidth_bytes_per_second is not None:
        link = replace(
            link,
            bandwidth_bytes_per_second=change.bandwidth_bytes_per_second,
            shared_bandwidth_bytes_per_second=change.bandwidth_bytes_per_second,
            samples=None,
        )
    if change.round_trip_seconds is not None:
        link = replace(link, latency_seconds=change.round_trip_seconds / 2, samples=None)
    return link
