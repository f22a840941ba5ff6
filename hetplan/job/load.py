"""How a job file is written, and from such a file to a Job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path as FilePath
from typing import Annotated, Literal, TypeAlias, get_args, get_type_hints

from pydantic import Field

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import Count, Name, NodeName, Ratio, Seconds
from hetplan.files.reading import Document, decode, read_document
from hetplan.job.spec import (
    MAX_DEPTH,
    MAX_QUANTILE,
    MAX_SECONDS,
    MAX_SEED,
    MAX_TOKENS,
    MIN_QUANTILE,
    SHARES_TOLERANCE,
    Forbids,
    Job,
    LengthShare,
    Objective,
    Optimizer,
    Pins,
    Precision,
    ProductFormat,
    TrainerOptions,
)
from hetplan.job.trainer import trainer_faults

JOB_SCHEMA = "hetplan.job/4"

TargetName: TypeAlias = Literal["native", "megatron", "flagscale", "torchtitan", "any"]
TARGET_NAMES: tuple[str, ...] = get_args(TargetName)
"""Trainers that a job may name: the keys of `hetplan.plans.targets.TARGETS`, which lies above."""

Fraction: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinsForm:
    """Choices that the search must keep; what is left out stays free."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    tp: Count | None = None
    """Tensor-parallel degree."""
    dp: Count | None = None
    """Data-parallel degree."""
    pp: Count | None = None
    """Pipeline stages."""
    microbatch_size: Count | None = None
    """Sequences per microbatch and data-parallel rank."""
    recompute: bool | None = None
    """Whether transformer layers are computed again in the backward pass."""
    embedding_on: Name | None = None
    """Island or device kind of the first stage."""
    head_on: Name | None = None
    """Island or device kind of the last stage."""
    cp: Count | None = None
    """Context-parallel degree."""
    ep: Count | None = None
    """Expert-parallel degree."""
    virtual_stages: Count | None = None
    """Chunks of layers per stage; 1: not interleaved."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks share what lies between their products."""
    sharded_optimizer: bool | None = None
    """Whether data-parallel ranks share the optimizer state."""
    pipelines: Count | None = None
    """Copies of the model, each over its own devices with its own share of the batch."""
    same_degrees: bool | None = None
    """True: all stages have one tp, dp and microbatch size, and each lies on one island."""
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    """Most microbatches that a stage keeps in flight beyond its schedule's own, with sends that do
    not wait for their receivers; 0: none, and sends wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForbidsForm:
    """Islands and nodes that stay out of the plan."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    islands: list[Name] = field(default_factory=list)
    """Names of islands."""
    nodes: list[NodeName] = field(default_factory=list)
    """Nodes as island/number, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthShareForm:
    """How many of the sequences have one length."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    length: Count
    """Tokens, at most sequence_length."""
    share: Annotated[float, Field(gt=0.0, le=1.0)]
    """Part of all sequences; the shares of all lengths sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerForm:
    """Settings of the trainer that change what a step costs; left out: as the target does."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    fused_attention: bool | None = None
    """One causal attention kernel; otherwise scores are written to memory."""
    attention_dropout: bool | None = None
    """Dropout of the attention's probabilities."""
    hidden_dropout: bool | None = None
    """Dropout of the embedding and of what every layer adds to its input, twice."""
    fused_loss: bool | None = None
    """Cross-entropy in one pass over the logits; otherwise of a float32 copy of them."""
    scattered_sends: bool | None = None
    """Without sequence parallelism a stage sends 1 / tp of its activations from every rank, and the
    receivers gather them; otherwise every rank sends all of them."""
    fused_accumulation: bool | None = None
    """Products add the gradients of the weights to those of the microbatches before; otherwise a
    pass of its own does."""
    blocking_sends: bool | None = None
    """Sends and receives follow each other, each holding both stages (DeepSpeed's pipeline);
    otherwise what two neighbours exchange moves both ways at once."""
    context_exchange: bool | None = None
    """Context parallelism by all-to-all of heads instead of ring attention."""
    gradient_precision: Precision | None = None
    """Number format in which gradients are kept and reduced: float32, or that of the weights."""
    product_format: ProductFormat | None = None
    """Narrower number format of the transformer layers' products with weights: float8, mxfp8 or
    nvfp4; the devices must have its rate. Left out: the job's precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForm:
    """One training job."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the job in reports."""
    global_batch_size: Count
    """Sequences per optimizer step."""
    sequence_length: Count
    """Tokens per sequence."""
    precision: Precision
    """Number format of weights, activations and matrix products."""
    optimizer: Optimizer
    """Update rule."""
    target: TargetName
    """Trainer that will run the plan."""
    objective: Objective = Objective.STEP_TIME
    """What is made as small as it can be: step_time, or cost_per_token where there are prices."""
    quantile: Annotated[float, Field(ge=MIN_QUANTILE, le=MAX_QUANTILE)] | None = None
    """Quantile of the predicted step that is compared. Left out: the estimate itself."""
    gap: Fraction = 0.01
    """The search may stop when no plan can be faster by more than this fraction of the step."""
    time_limit: Seconds | None = None
    """Longest search; left out: until the gap is reached."""
    total_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens of the whole training run, for its duration."""
    memory_reserve_fraction: Fraction = 0.1
    """Part of every device's memory that plans leave free for fragmentation and communication."""
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED + 1)] = 0
    """Start of every random choice; the same seed gives the same plan."""
    sequence_lengths: list[LengthShareForm] = field(default_factory=list)
    """Lengths of the sequences where they differ; left out: all have sequence_length."""
    packing: bool = False
    """Short sequences are put together into rows of sequence_length tokens, each attending only to
    itself; otherwise every one is padded to sequence_length."""
    expert_load_factor: Ratio = 1.0
    """Tokens of the busiest expert-parallel rank over the mean of all. Left out: 1, equal loads."""
    gradient_clipping: bool | None = None
    """Whether gradients are clipped by their global norm. Left out: as the target does."""
    data_loading: Seconds | None = None
    """Time of every step that the devices wait for their data. Left out: none, it is prefetched."""
    checkpoint_interval_steps: Count | None = None
    """Steps from one checkpoint to the next. Left out: no checkpoints are counted."""
    trainer: TrainerForm = TrainerForm()
    """Settings of the trainer that change what a step costs."""
    pin: PinsForm = PinsForm()
    """Choices that the search must keep."""
    forbid: ForbidsForm = ForbidsForm()
    """What the plan must not use."""


def load_job(path: str | FilePath) -> Job:
    """The job that the file describes; one InputError with every fault otherwise."""
    return read_job(read_document(FilePath(path)))


def read_job(document: Document) -> Job:
    """The same of a document that was read, with or without settings over it."""
    form = decode(document, JobForm, schema=JOB_SCHEMA, checks=(_check_batch, _check_lengths))
    if form.data_loading is not None and form.data_loading > MAX_SECONDS:
        message = f"{form.data_loading:g} s; a step waits at most {MAX_SECONDS:g} s for its data"
        raise InputError(document.fault(("data_loading",), message))
    job = _job(form)
    faults = [document.fault(("trainer", name), message) for name, message in trainer_faults(job)]
    if faults:
        raise InputError(*faults)
    return job


def _job(form: JobForm) -> Job:
    """Fields of one name are one thing in the file and in the job; the others are listed here."""
    values = {each.name: getattr(form, each.name) for each in fields(form)}
    values["time_limit_seconds"] = values.pop("time_limit")
    values["data_loading_seconds"] = values.pop("data_loading") or 0.0
    values["sequence_lengths"] = tuple(
        LengthShare(length=entry.length, share=entry.share) for entry in form.sequence_lengths
    )
    values["trainer"] = TrainerOptions(**asdict(form.trainer))
    values["pin"] = Pins(**asdict(form.pin))
    values["forbid"] = Forbids(islands=tuple(form.forbid.islands), nodes=tuple(form.forbid.nodes))
    return Job(**values)


def job_keys() -> Iterator[str]:
    """Every key of a job file that `--set` takes, nested ones with dots."""
    for each in fields(JobForm):
        nested = get_type_hints(JobForm)[each.name]
        if is_dataclass(nested):
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
