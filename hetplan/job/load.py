"""From a job file to a Job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.errors import Fault
from hetplan.files.reading import Document, decode, read_document
from hetplan.job.file_form import JOB_SCHEMA, JobForm
from hetplan.job.spec import Forbids, Job, Pins


def load_job(path: str | Path) -> Job:
    """The job that the file describes; one InputError with every fault otherwise."""
    document = read_document(Path(path))
    form = decode(document, JobForm, schema=JOB_SCHEMA, checks=(_check_batch,))
    pin, forbid = form.pin, form.forbid
    return Job(
        name=form.name,
        global_batch_size=form.global_batch_size,
        sequence_length=form.sequence_length,
        precision=form.precision,
        optimizer=form.optimizer,
        target=form.target,
        gap=form.gap,
        time_limit_seconds=form.time_limit,
        total_tokens=form.total_tokens,
        memory_reserve_fraction=form.memory_reserve_fraction,
        seed=form.seed,
        pin=Pins(
            tp=pin.tp,
            dp=pin.dp,
            pp=pin.pp,
            microbatch_size=pin.microbatch_size,
            recompute=pin.recompute,
            embedding_on=pin.embedding_on,
            head_on=pin.head_on,
        ),
        forbid=Forbids(islands=tuple(forbid.islands), nodes=tuple(forbid.nodes)),
    )


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
