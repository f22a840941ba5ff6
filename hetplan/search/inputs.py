"""From a model, a cluster and a job file to the checked inputs of a search or an estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hetplan.cluster.load import load_cluster
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_document
from hetplan.files.settings import Setting, with_settings
from hetplan.job.check import check_job_against
from hetplan.job.load import read_job
from hetplan.model.load import load_model
from hetplan.search.result import Inputs

_S = TypeVar("_S")
_T = TypeVar("_T")


def load_inputs(
    model: Path,
    cluster: Path,
    job: Path,
    *,
    settings: Sequence[Setting] = (),
    searched: bool = True,
) -> Inputs:
    """The three inputs, checked one by one and against each other; settings replace the job's.

    One InputError with the faults of all three files. Not searched: models that can be priced but
    not searched are read.
    """
    faults: list[Fault] = []

    def attempt(load: Callable[[_S], _T], source: _S) -> _T | None:
        try:
            return load(source)
        except InputError as error:
            faults.extend(error.faults)
            return None

    model_spec = attempt(load_model, model)
    cluster_spec = attempt(load_cluster, cluster)
    document = attempt(read_document, job)
    if document is not None:
        document = with_settings(document, settings)
    job_spec = None if document is None else attempt(read_job, document)
    if model_spec is None or cluster_spec is None or document is None or job_spec is None:
        raise InputError(*faults)
    against = check_job_against(job_spec, model_spec, cluster_spec, document, searched=searched)
    if against:
        raise InputError(
            *(
                replace(fault, file=str(model), field="") if fault.field == "model" else fault
                for fault in against
            )
        )
    return Inputs(
        model=model_spec,
        cluster=cluster_spec,
        job=job_spec,
        sha256=(
            ("model", read_document(model).sha256),
            ("cluster", read_document(cluster).sha256),
            ("job", document.sha256),
        ),
    )
