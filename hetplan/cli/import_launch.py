"""`hetplan import launch`: a launch of a trainer as a plan, priced like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hetplan.cli.options import emit, read_predictor, say
from hetplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.cost.estimate_values import Estimate
    from hetplan.importers.launches.plan import ImportedLaunch
    from hetplan.importers.launches.values import LaunchHost, LaunchText
    from hetplan.job.spec import Job
    from hetplan.model.spec import ModelSpec

_T = TypeVar("_T")

LAUNCHES = (
    ("megatron", "launch of Megatron-LM, MindSpeed, Megatron-Bridge: script, arguments, folder"),
    ("flagscale", "launch of FlagScale: experiment YAML with its hostfile, folder"),
    ("torchtitan", "launch of torchtitan: script, arguments, TOML, folder"),
)
"""Kinds of `hetplan import` whose files are launches, and what each reads."""

_SHARED = ("model", "island", "hosts", "store", "out", "force", "as_json")
"""Options that other kinds have as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The options of such an import, as they were given."""

    cluster: Path | None
    job: Path | None
    set: tuple[str, ...]
    target: str | None
    predictor: Path | None
    draft_model: Path | None
    draft_job: Path | None
    model: Path | None
    island: str | None
    hosts: Path | None
    store: Path | None
    out: Path | None
    force: bool
    as_json: bool

    def check_unused(self) -> None:
        """An InputError where options of launches were given with another kind."""
        own = [each.name for each in fields(self) if each.name not in _SHARED]
        names = [name for name in own if getattr(self, name)]
        if names:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            kinds = ", ".join(name for name, _ in LAUNCHES)
            raise InputError(f"{given}: only with a launch, whose kinds are {kinds}")


def is_launch(kind: str) -> bool:
    """Whether files of this kind are launches."""
    return kind in dict(LAUNCHES)


def import_launch(kind: str, files: list[Path], request: LaunchRequest) -> None:
    """Read the launch, price it on the cluster, show the price, write what was asked for."""
    from hetplan.cost.estimate import estimate_with, misfits
    from hetplan.cost.priced.pricer import Pricer
    from hetplan.files.writing import check_new
    from hetplan.importers.launches.open import read_launch
    from hetplan.importers.launches.plan import launch_plan
    from hetplan.search.families.allowed import allowed_cluster

    if len(files) != 1 or request.cluster is None:
        what = "give --cluster FILE, on which it runs" if len(files) == 1 else "name one"
        raise InputError(f"a launch is one FILE or folder, priced on a cluster: {what}")
    for path in (request.out, request.draft_model, request.draft_job):
        check_new(path, force=request.force)
    text = read_launch(kind, files[0], _given(request.set), _hosts(request.hosts))
    model, cluster, job = _inputs(request, text, files[0])
    usable = cluster if job is None else allowed_cluster(cluster, job)
    imported = launch_plan(text, model, usable, job, request.target, _islands(request.island))
    _check_job(imported, model, cluster)
    _drafts(request, imported, model)
    stores = None if request.store is None else [request.store]
    predict, digest = read_predictor(request.predictor, stores)
    pricer = Pricer(model, usable, imported.job, predict)
    found = estimate_with(pricer, imported.plan)
    for remark in imported.remarks:
        say(f"note: {remark}")
    _write(request, files[0], imported, model, cluster, digest, found)
    _show(model, imported, found, as_json=request.as_json)
    unfit = misfits(found)
    if unfit:
        raise InfeasibleError(unfit)


def _given(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE of every --set."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--")
        if not name or not equals:
            raise InputError(f"--set {word[:60]!a}: write NAME=VALUE, as in --set TP=8")
        found.append((name, value))
    return tuple(found)


def _islands(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))


def _hosts(path: Path | None) -> tuple[LaunchHost, ...]:
    from hetplan.importers.launches.flagscale import hosts_of_file

    return () if path is None else hosts_of_file(path)


def _inputs(
    request: LaunchRequest, text: LaunchText, file: Path
) -> tuple[ModelSpec, Cluster, Job | None]:
    """The inputs that were given, faults of all together; the model from the launch otherwise."""
    from hetplan.cluster.load import load_cluster
    from hetplan.errors import Fault
    from hetplan.importers.launches.model import launch_model
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model

    faults: list[Fault] = []

    def attempt(load: Callable[[], _T]) -> _T | None:
        try:
            return load()
        except InputError as error:
            faults.extend(error.faults)
            return None

    given, name = request.model, file.stem
    if given is None:
        name = name if name.isprintable() and name else "launch"
        model = attempt(lambda: launch_model(text, name))
    else:
        model = attempt(lambda: load_model(given))
    cluster = attempt(lambda: load_cluster(request.cluster or Path()))
    job = None if request.job is None else attempt(lambda: load_job(request.job or Path()))
    if faults or model is None or cluster is None:
        raise InputError(*faults)
    return model, cluster, job


def _check_job(imported: ImportedLaunch, model: ModelSpec, cluster: Cluster) -> None:
    from hetplan.job.check import check_job_against

    faults = check_job_against(imported.job, model, cluster, searched=False)
    if faults:
        raise InputError(*faults)


def _drafts(request: LaunchRequest, imported: ImportedLaunch, model: ModelSpec) -> None:
    """Model and job as files, so that the same question can be planned."""
    from hetplan.files.writing import write_atomically
    from hetplan.importers.launches.drafts import job_text, model_text

    if request.draft_model is not None:
        write_atomically(request.draft_model, model_text(model))
        say(f"wrote {request.draft_model}")
    if request.draft_job is not None:
        write_atomically(request.draft_job, job_text(imported.job))
        say(f"wrote {request.draft_job}")


def _write(
    request: LaunchRequest,
    file: Path,
    imported: ImportedLaunch,
    model: ModelSpec,
    cluster: Cluster,
    digest: str,
    estimate: Estimate,
) -> None:
    """The plan file: without a certificate, as it was given and not searched."""
    import hashlib

    from hetplan.files.reading import read_bytes, read_document
    from hetplan.search.files import SCHEMA, save_result
    from hetplan.search.result import Inputs, SearchResult
    from hetplan.version import __version__

    if request.out is None:
        return
    read = (("model", request.model), ("cluster", request.cluster), ("job", request.job))
    digests = [(name, read_document(path).sha256) for name, path in read if path is not None]
    if file.is_file():
        digests.append(("launch", hashlib.sha256(read_bytes(file)).hexdigest()))
    save_result(
        SearchResult(
            schema=SCHEMA,
            hetplan_version=__version__,
            seed=imported.job.seed,
            inputs=Inputs(
                model=model,
                cluster=cluster,
                job=imported.job,
                sha256=(*digests, ("predictor", digest)),
            ),
            plan=imported.plan,
            estimate=estimate,
            certificate=None,
        ),
        request.out,
    )
    say(f"wrote {request.out}")


def _show(model: ModelSpec, imported: ImportedLaunch, estimate: Estimate, *, as_json: bool) -> None:
    from hetplan.cli.estimate import ESTIMATE_SCHEMA
    from hetplan.files.encoding import encode

    if as_json:
        emit(encode(estimate, schema=ESTIMATE_SCHEMA))
        return
    from hetplan.importers.launches.facts import title_of
    from hetplan.reports.plans import component_table, estimate_lines, memory_line, stage_table
    from hetplan.reports.terminal import print_table

    emit(title_of(imported.facts))
    print_table(stage_table(model, imported.plan, estimate))
    print_table(component_table(estimate))
    memory = memory_line(estimate)
    if memory is not None:
        emit(memory)
    for line in estimate_lines(estimate):
        emit(line)
