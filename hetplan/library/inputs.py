"""What the library's functions take: files or values, a job in keywords, predictors of any kind."""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path
from typing import TypeVar

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, read_document
from hetplan.files.settings import given_path, keywords
from hetplan.files.shipped import default_stores
from hetplan.job.load import JOB_SCHEMA, read_job
from hetplan.job.spec import Job
from hetplan.library.values import File, meant_path
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import (
    FittedPredictor,
    predictor_of_files,
    predictor_text,
)
from hetplan.predict.predictor import Predictor
from hetplan.search.files import load_inputs
from hetplan.search.result import Inputs
from hetplan.trainers.before_search import question_faults, unknown_kinds

T = TypeVar("T")


def make_job(
    *,
    global_batch_size: int,
    sequence_length: int,
    target: str = "megatron",
    precision: str = "bfloat16",
    optimizer: str = "adamw",
    total_tokens: int | float | str | None = None,
    name: str = "job",
    **more: object,
) -> Job:
    """A job from the keys of a job file.

    docs/file-forms.md explains them. global_batch_size: sequences per optimizer step;
    sequence_length: tokens per sequence; target: the trainer (flagscale and native train devices of
    several makers together); total_tokens: of the whole run, as a number or as in "2T"; times as in
    time_limit="60 s"; pin, forbid and trainer are dicts, as in pin={"tp": 8}. InputError names
    every key that is wrong.
    """
    if isinstance(total_tokens, float) and total_tokens.is_integer():
        total_tokens = int(total_tokens)  # 2e12 is how Python writes a number of this size
    given = {
        "name": name,
        "global_batch_size": global_batch_size,
        "sequence_length": sequence_length,
        "precision": precision,
        "optimizer": optimizer,
        "target": target,
        "total_tokens": total_tokens,
        **more,
    }
    return read_job(keywords(given, JOB_SCHEMA))


def question_of(
    model: ModelSpec | File, cluster: Cluster | File, job: Job | File, *, searched: bool = True
) -> tuple[Inputs, Document]:
    """The three inputs, checked against each other, and the job as a document for its faults."""
    sources = (
        _file_or(model, ModelSpec, "model", "load_model"),
        _file_or(cluster, Cluster, "cluster", "load_cluster"),
        _file_or(job, Job, "job", "load_job or make_job"),
    )
    if isinstance(sources[0], Path):
        sources = (meant_path(sources[0]), *sources[1:])
    inputs = load_inputs(*sources, searched=searched)
    *_, job_file = sources
    document = read_document(job_file) if isinstance(job_file, Path) else keywords({}, JOB_SCHEMA)
    return inputs, document


def check_before_search(
    inputs: Inputs, document: Document, cluster: Cluster | File, predictor: Predictor
) -> None:
    """An InputError where the trainer can be told no plan, or nothing is known of a kind."""
    faults = tuple(question_faults(inputs, document))
    if not faults:
        file = None if isinstance(cluster, Cluster) else Path(cluster)
        faults = tuple(unknown_kinds(inputs, predictor, file))
    if faults:
        raise InputError(*faults)


def _file_or(given: T | File, type_: type[T], what: str, made_by: str) -> T | Path:
    if isinstance(given, type_):
        return given
    return given_path(given, what, f", or what {made_by} gives")


def predictor_of(given: Predictor | File | None) -> tuple[Predictor, str]:
    """The predictor, and the sha256 of its text; empty where it has none.

    None: fitted from the user's own profile store and the shipped profiles. A path: a file that
    `hetplan fit` wrote, or a profile store. Kinds that these lack are known by what others
    measured. A value is taken as it is.
    """
    if given is None:
        return predictor_of_files(None, default_stores())
    if isinstance(given, str | PathLike):
        path = Path(given)
        return predictor_of_files(None if path.is_dir() else path, (path,))
    if isinstance(given, FittedPredictor):
        return given, hashlib.sha256(predictor_text(given).encode()).hexdigest()
    if not hasattr(given, "layer"):
        message = f"found a value of {type(given).__name__}; give a path, or what fit gives"
        raise InputError(Fault(field="predictor", message=message))
    return given, ""
