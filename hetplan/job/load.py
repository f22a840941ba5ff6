"""How a job file is written, and from such a file to a Job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path as FilePath
from typing import Literal, TypeAlias, get_args, get_type_hints

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import (
    Seconds,
    value_of,
)
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.settings import given_path
from hetplan.job.run import RunForm, run_of
from hetplan.job.spec import (
    MAX_SECONDS,
    SHARES_TOLERANCE,
    Job,
    JobSettings,
    Precision,
    ProductFormat,
)
from hetplan.job.trainer import trainer_faults

JOB_SCHEMA = "hetplan.job/7"

TargetName: TypeAlias = Literal["native", "megatron", "flagscale", "torchtitan", "any"]
TARGET_NAMES: tuple[str, ...] = get_args(TargetName)
"""Trainers that a job may name: the keys of `hetplan.plans.targets.TARGETS`, which lies above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForm(JobSettings):
    """One training job."""

    target: TargetName
    """Trainer that will run the plan."""
    time_limit: Seconds | None = None
    """Longest search; left out: until the gap is reached."""
    data_loading: Seconds | None = None
    """Wait of every step for its data. Left out: none, it is prefetched."""
    run: RunForm = field(default_factory=RunForm)
    """Storage, failures and restarts."""


def load_job(path: str | FilePath | Document) -> Job:
    """The job that the file describes; one InputError with every fault otherwise."""
    given = path if isinstance(path, Document) else given_path(path, "path", ", or a document")
    return read_job(read_document(given))


def read_job(document: Document) -> Job:
    """The same of a document that was read, with or without settings over it."""
    document = _with_narrow_products(document)
    form = decode(document, JobForm, schema=JOB_SCHEMA, checks=(_check_batch, _check_lengths))
    if form.data_loading is not None and form.data_loading > MAX_SECONDS:
        message = f"{form.data_loading:g} s; a step waits at most {MAX_SECONDS:g} s for its data"
        raise InputError(document.fault(("data_loading",), message))
    try:
        run = run_of(form.run)
    except InputError as error:
        raise InputError(document.fault(("run",), str(error))) from None
    job = value_of(
        Job,
        form,
        time_limit_seconds=form.time_limit,
        data_loading_seconds=form.data_loading or 0.0,
        run=run,
    )
    faults = [document.fault(("trainer", name), message) for name, message in trainer_faults(job)]
    if faults:
        raise InputError(*faults)
    return job


def _with_narrow_products(document: Document) -> Document:
    """`precision: fp8` is bfloat16 with products in float8; likewise mxfp8 and nvfp4."""
    narrow = narrow_format(document.at("precision"))
    trainer = document.at("trainer")
    if narrow is None or not isinstance(document.root, dict):
        return document
    own = trainer.get("product_format", narrow) if isinstance(trainer, dict) else narrow
    if own != narrow or not isinstance(trainer, dict | None):
        return document
    trainer = {**(trainer or {}), "product_format": narrow.value}
    root = {**document.root, "precision": Precision.BFLOAT16.value, "trainer": trainer}
    return replace(document, root=root)


def narrow_format(precision: object) -> ProductFormat | None:
    """The format of products that somebody means who calls it the precision of the job."""
    try:
        return ProductFormat(str(precision)) if isinstance(precision, str) else None
    except ValueError:
        return None


def job_keys() -> Iterator[str]:
    """Every key of a job file that `--set` takes, nested ones with dots."""
    for each in fields(JobForm):
        hint = get_type_hints(JobForm)[each.name]
        nested = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if nested is not None:
            yield from (f"{each.name}.{inner.name}" for inner in fields(nested))
        else:
            yield each.name


def _check_batch(document: Document) -> Iterator[Fault]:
    """The pinned microbatch size and dp divide the batch, alone and together."""
    batch = document.whole(("global_batch_size",))
    if batch is None:
        return
    size = document.whole(("pin", "microbatch_size"))
    dp = document.whole(("pin", "dp"))
    alone = [("microbatch_size", size), ("dp", dp)]
    wrong = [(key, value) for key, value in alone if value is not None and batch % value]
    for key, value in wrong:
        yield document.fault(
            ("pin", key), f"{value} does not divide global_batch_size {batch}; pin a divisor of it"
        )
    if size and dp and not wrong and batch % (size * dp):
        yield document.fault(
            ("pin",),
            f"microbatch_size {size} x dp {dp} = {size * dp} does not divide "
            f"global_batch_size {batch}; their product must be a divisor of it",
        )


def _check_lengths(document: Document) -> Iterator[Fault]:
    """Lengths are unlike and no longer than a row, their shares sum to 1, packing has lengths."""
    row = document.whole(("sequence_length",))
    first: dict[int, int] = {}
    shares: list[float] = []
    entries = document.entries(("sequence_lengths",))
    for at in entries:
        path: Path = ("sequence_lengths", at)
        length = document.whole((*path, "length"))
        share = document.at(*path, "share")
        if isinstance(share, int | float) and not isinstance(share, bool):
            shares.append(float(share))
        if length is None:
            continue
        if row is not None and length > row:
            yield document.fault(
                (*path, "length"),
                f"{length} is longer than sequence_length {row}; longer sequences are cut first, "
                "so count them as that long, or raise sequence_length",
            )
        if length in first:
            message = f"{length} is already listed on line {first[length]}; add the shares up"
            yield document.fault((*path, "length"), message)
        first.setdefault(length, document.line((*path, "length")))
    total = sum(shares)
    if entries and len(shares) == len(entries) and abs(total - 1.0) > SHARES_TOLERANCE:
        yield document.fault(
            ("sequence_lengths",), f"the shares sum to {total:.6g}; they are parts of 1"
        )
    if document.at("packing") is True and not entries:
        yield document.fault(
            ("packing",), "packs nothing where all sequences are as long; add sequence_lengths"
        )
