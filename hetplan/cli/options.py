"""Options that several commands share, and how their values are read.

Only the standard library and typer are imported here: `hetplan --help` must answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import Inputs

_T = TypeVar("_T")

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""

PredictorFile = Annotated[
    Path | None,
    typer.Option("--predictor", help="Predictor that `hetplan fit` wrote; skips the fit."),
]
Stores = Annotated[
    list[Path] | None,
    typer.Option(
        "--store",
        help="Profile store; may be repeated. Default: your own store, then the shipped profiles.",
    ),
]
TargetName = Annotated[
    str | None, typer.Option("--target", help="Trainer that will run the plan, over the job's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def say(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    print(text, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """A result, on stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def check_replaceable(out: Path, schema: str, what: str) -> str:
    """What to add to `wrote FILE`: that a file of this schema, a `what`, was there before.

    An InputError where the file cannot be written, or would replace something else: a person's
    notes, an input, a run log.
    """
    import json

    from hetplan.errors import Fault, InputError
    from hetplan.files.writing import check_writable

    check_writable(out)
    if not out.exists() or out.stat().st_size == 0:
        return ""
    try:
        found = json.loads(out.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    held = found.get("schema") if isinstance(found, dict) else None
    if str(held).partition("/")[0] != schema.partition("/")[0]:
        message = (
            f"exists and is no {what}; nothing was changed: give the name of a new file, or of a "
            f"{what} to replace"
        )
        raise InputError(Fault(file=str(out), message=message))
    return f", replacing the {what} that was there"


def read_inputs(
    model: Path, cluster: Path, job: Path, target: str | None = None, *, searched: bool = True
) -> Inputs:
    """The three inputs, each checked by itself and all against each other.

    Faults of all three files are reported together. Not searched: models that can be priced but
    not searched are read.
    """
    from hetplan.cluster.load import load_cluster
    from hetplan.errors import Fault, InputError
    from hetplan.files.reading import read_document
    from hetplan.job.check import check_job_against
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model
    from hetplan.plans.targets import target as known_target
    from hetplan.search.result import Inputs as InputsValue

    faults: list[Fault] = []

    def attempt(load: Callable[[Path], _T], path: Path) -> _T | None:
        try:
            return load(path)
        except InputError as error:
            faults.extend(error.faults)
            return None

    model_spec = attempt(load_model, model)
    cluster_spec = attempt(load_cluster, cluster)
    job_spec = attempt(load_job, job)
    if model_spec is None or cluster_spec is None or job_spec is None:
        raise InputError(*faults)
    if target is not None:
        job_spec = replace(job_spec, target=known_target(target).name)
    job_document = read_document(job)
    inputs = InputsValue(
        model=model_spec,
        cluster=cluster_spec,
        job=job_spec,
        sha256=(
            ("model", read_document(model).sha256),
            ("cluster", read_document(cluster).sha256),
            ("job", job_document.sha256),
        ),
    )
    against = check_job_against(
        inputs.job, inputs.model, inputs.cluster, job_document, searched=searched
    )
    if against:
        raise InputError(
            *(
                replace(fault, file=str(model), field="") if fault.field == "model" else fault
                for fault in against
            )
        )
    return inputs


def stores_to_read(stores: list[Path] | None) -> tuple[Path, ...]:
    """The folders named, or the user's store (where there is one) and the shipped profiles."""
    from hetplan.files.shipped import default_stores

    return tuple(stores) if stores else default_stores()


def read_predictor(predictor: Path | None, stores: list[Path] | None) -> tuple[Predictor, str]:
    """The predictor of the file, or one fitted from the stores; and the sha256 of its text."""
    from hetplan.errors import InputError
    from hetplan.files.reading import read_document
    from hetplan.predict.fit import fit_stores, load_predictor

    if predictor is not None and stores:
        raise InputError("--predictor skips the fit, --store is what would be fitted: give one")
    if predictor is not None:
        return load_predictor(predictor), read_document(predictor).sha256
    return fit_stores(*stores_to_read(stores))
