"""Files of a search: its checked inputs, and its result as one JSON file with all behind it."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import Fault, FaultList, InputError
from hetplan.files.encoding import canonical, encode
from hetplan.files.locks import Lock
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.settings import Setting, with_settings
from hetplan.files.writing import write_atomically
from hetplan.job.load import read_job
from hetplan.job.spec import Job
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_job import check_job_against
from hetplan.plans.pinned import with_named_ends
from hetplan.plans.plan import Plan
from hetplan.search import file_rules
from hetplan.search.result import Inputs, SearchResult
from hetplan.version import __version__

SCHEMA = "hetplan.plan/16"

_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
"""List positions and keys of a field's text, as in plan.pipelines[0].stages."""


def result_text(result: SearchResult) -> str:
    """Canonical JSON text of a result in the newest form; equal results give equal bytes."""
    result = replace(result, schema=SCHEMA)
    return encode(replace(result, seal=seal_of(result)), schema=SCHEMA)


def priced_result(
    inputs: Inputs, plan: Plan, estimate: Estimate, predictor_sha256: str
) -> SearchResult:
    """A plan that was given and priced, as a plan file holds it: without a certificate.

    The digest is empty where the predictor has no text.
    """
    files = tuple(entry for entry in inputs.sha256 if entry[0] != "predictor")
    if predictor_sha256:
        files += (("predictor", predictor_sha256),)
    return SearchResult(
        schema=SCHEMA,
        hetplan_version=__version__,
        seed=inputs.job.seed,
        inputs=replace(inputs, sha256=files),
        plan=plan,
        estimate=estimate,
        certificate=None,
    )


def seal_of(result: SearchResult) -> str:
    """What a result's file is sealed with: it tells an edited file from a written one."""
    return _digest(encode(replace(result, seal=""), schema=result.schema))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def save_result(result: SearchResult, path: Path) -> None:
    """Write the result; the file is whole or, after a fault, as it was before."""
    write_atomically(path, result_text(result))


def save_in_place(result: SearchResult, path: Path, sha256: str) -> str:
    """Write the result over the file of this digest that it was read from; the new digest.

    An InputError where that file was replaced meanwhile.
    """
    with Lock(path).take():
        if read_document(path).sha256 != sha256:
            message = "was replaced while it was planned again; ask about the new plan"
            raise InputError(Fault(file=str(path), message=message))
        save_result(result, path)
        return read_document(path).sha256


def load_legal_plan(path: str | Path | Document) -> SearchResult:
    """The result of a file written by `save_result`.

    An InputError where the file was changed since, with every rule that its parts break.
    """
    document = read_document(path)
    result = _result(document)
    faults = [] if is_sealed(document) is not False else [_changed(document)]
    faults += file_rules.faults(result)
    if faults:
        raise InputError(*(_placed(document, fault) for fault in faults))
    return result


def load_layout(path: str | Path) -> tuple[SearchResult, bool]:
    """The same for who prices the plan again, and whether the file is as hetplan wrote it.

    Of a file that was changed its inputs and its plan are checked; nothing else of it counts.
    """
    document = read_document(path)
    result = _result(document)
    if is_sealed(document) is not False:
        return load_legal_plan(document), True
    if faults := file_rules.layout_faults(result):
        raise InputError(*(_placed(document, fault) for fault in faults))
    return result, False


def is_sealed(document: Document) -> bool | None:
    """Whether a plan file is as hetplan wrote it; None: its form is older than seals."""
    root = document.root
    seal, form = document.at("seal"), str(document.at("schema")).rpartition("/")[2]
    if not isinstance(root, dict) or (not seal and int(form) < _FIRST_SEALED):
        return None
    try:
        return seal == _digest(canonical({**root, "seal": ""}))
    except ValueError:  # a number that JSON cannot hold
        return False


_FIRST_SEALED = 9
"""The first form whose files have a seal."""


def _changed(document: Document) -> Fault:
    message = "the file was changed after hetplan wrote it: plan again, or price the plan that it "
    message += f"has now with `hetplan estimate {shlex.quote(document.file)} --out NEW.json`"
    return Fault(field="seal", message=message)


def _result(document: Document) -> SearchResult:
    result = decode(document, SearchResult, schema=SCHEMA)
    # What an older number lacks has its default now, so that the value can be saved again; the seal
    # is the file's.
    return replace(result, schema=SCHEMA, seal="")


def placed_faults(path: str | Path, faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Faults whose fields are places in a plan file, with that file and their lines."""
    document = read_document(Path(path))
    return tuple(_placed(document, fault) for fault in faults)


def _placed(document: Document, fault: Fault) -> Fault:
    """The fault with its file and line."""
    steps = (int(number) if number else word for number, word in _STEPS.findall(fault.field))
    return replace(fault, file=document.file, line=document.line(tuple(steps)))


def load_inputs(
    model: Path | Document | ModelSpec,
    cluster: Path | Document | Cluster,
    job: Path | Document | Job,
    *,
    settings: Sequence[Setting] = (),
    searched: bool = True,
) -> Inputs:
    """The three inputs, checked one by one and against each other; settings replace the job
    file's. What is no path is at hand already.

    One InputError with the faults of all three files. Not searched: models that can be priced but
    not searched are read.
    """
    faults = FaultList()
    model_spec = model if isinstance(model, ModelSpec) else faults.of(load_model, model)
    cluster_spec = cluster if isinstance(cluster, Cluster) else faults.of(load_cluster, cluster)
    job_spec, document = (
        (job, None) if isinstance(job, Job) else (None, faults.of(read_document, job))
    )
    if document is not None:
        document = with_settings(document, settings)
        job_spec = faults.of(read_job, document)
    if model_spec is None or cluster_spec is None or job_spec is None:
        raise InputError(*faults.found)
    job_spec = with_named_ends(job_spec, cluster_spec)
    against = check_job_against(job_spec, model_spec, cluster_spec, document, searched=searched)
    if against:
        if not isinstance(model, ModelSpec):
            file = read_document(model).file
            against = tuple(
                replace(fault, file=file, field="") if fault.field == "model" else fault
                for fault in against
            )
        raise InputError(*against)
    return Inputs(
        model=model_spec,
        cluster=cluster_spec,
        job=job_spec,
        sha256=tuple(
            (name, read_document(file).sha256)
            for name, file in (("model", model), ("cluster", cluster), ("job", job))
            if not isinstance(file, ModelSpec | Cluster | Job)
        ),
    )
