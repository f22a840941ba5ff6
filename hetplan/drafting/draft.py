"""What `hetplan init` writes: the texts of cluster, model and job, and what nobody said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeVar

from hetplan.cluster.libraries import libraries_of
from hetplan.cluster.spec import Cluster
from hetplan.drafting.cluster import draft_cluster_text
from hetplan.drafting.model import meant_model, model_lines, shipped_models
from hetplan.drafting.seen import Seen
from hetplan.drafting.text import comment, scalar
from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, document_of, read_bytes
from hetplan.job.kernels import kernel_fault
from hetplan.job.load import JOB_SCHEMA, TARGET_NAMES, narrow_format
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.units import format_count

CLUSTER_FILE, MODEL_FILE, JOB_FILE = "cluster.yaml", "model.yaml", "job.yaml"
DEFAULT_BATCH, DEFAULT_SEQUENCE = 1024, 4096
"""4M tokens a step, as Llama 2 and 3 began with (arXiv 2307.09288, 2407.21783)."""
_T = TypeVar("_T", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWords:
    """What the user says of a job; None: the default."""

    batch: int | None = None
    """Sequences per optimizer step."""
    sequence: int | None = None
    """Tokens per sequence."""
    tokens: int | None = None
    """Of the whole run."""
    target: str | None = None
    precision: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A file that nobody wrote, and what nobody said of it, one sentence each."""

    document: Document
    assumed: tuple[str, ...]


def drafted_cluster(
    nodes: Sequence[str], between: Sequence[str], seen: Seen | None = None
) -> Drafted:
    """The cluster file of these nodes and links, with what files say of the nodes."""
    found = draft_cluster_text(nodes, between, seen)
    document = document_of(f"drafted {CLUSTER_FILE}", found.text.encode())
    return Drafted(document=document, assumed=found.assumed)


def drafted_model(text: str) -> Drafted:
    """A copy of the model's file: `model.yaml`, or the `config.json` of a hub as it is."""
    meant = meant_model(text)
    data = read_bytes(meant.path)
    notes = (meant.note,) if meant.note else ()
    if meant.path in shipped_models().values():
        marks = (f"assumed: {note}" for note in notes)
        lines = [*chain.from_iterable(comment(mark, 0) for mark in marks), *model_lines(meant.path)]
        data = ("\n".join(lines) + "\n").encode()
    name = "config.json" if meant.path.suffix.lower() == ".json" else MODEL_FILE
    return Drafted(document=document_of(f"drafted {name}", data), assumed=notes)


def drafted_job(words: JobWords, model: ModelSpec, cluster: Cluster) -> Drafted:
    """The job file of these words."""
    text, assumed = job_text(words, model, cluster)
    document = document_of(f"drafted {JOB_FILE}", text.encode())
    return Drafted(document=document, assumed=assumed)


def job_text(words: JobWords, model: ModelSpec, cluster: Cluster) -> tuple[str, tuple[str, ...]]:
    """The job file, and what was assumed."""
    batch = words.batch or DEFAULT_BATCH
    sequence = words.sequence or min(DEFAULT_SEQUENCE, model.max_sequence_length)
    narrow = narrow_format(words.precision)
    optimizer = _named(Optimizer, "--optimizer", words.optimizer or "adamw")
    libraries = libraries_of(cluster)
    target = words.target or ("flagscale" if len(libraries) > 1 else "megatron")
    if target not in TARGET_NAMES:
        raise InputError(Fault(field="--target", message=_one_of(target, TARGET_NAMES)))
    lacking = any(kernel_fault(each.device, "bfloat16", target) for each in cluster.islands)
    usual = Precision.FLOAT16 if lacking and not narrow else Precision.BFLOAT16
    said = None if narrow else words.precision
    precision = _named(Precision, "--precision", said or usual.value)
    others = ", ".join(name for name in TARGET_NAMES if name != target)
    why = f"trains {', '.join(libraries)} together" if len(libraries) > 1 else ""
    assumed = {
        "global_batch_size": f"batch {batch:,}" if words.batch is None else "",
        "sequence_length": f"sequences of {sequence:,}" if words.sequence is None else "",
        "precision": precision.value if words.precision is None else "",
        "target": f"target {target}" if words.target is None else "",
    }

    def line(key: str, value: object, text: str) -> str:
        mark = "assumed: " if assumed.get(key) else ""
        return f"{key}: {value} # {mark}{text}"

    lines = [
        *comment(f"{model.name}: every key is explained in configs/jobs/llama-140b.yaml.", 0),
        f"schema: {JOB_SCHEMA}",
        f"name: {scalar(model.name)}",
        line("global_batch_size", batch, "sequences of one optimizer step, over all devices"),
        line("sequence_length", sequence, "tokens of a sequence"),
        line("precision", precision.value, "or bf16, fp16, fp32, fp8 (products of bfloat16)"),
        line("optimizer", optimizer.value, "adamw or sgd"),
        line("target", target, f"{why + '; ' if why and not words.target else ''}or {others}"),
        "gap: 0.01 # stop where no plan can be faster by more than this part",
        "time_limit: 60 s # of the search",
    ]
    if words.tokens is not None:
        lines.append(f"total_tokens: {words.tokens} # {format_count(words.tokens)}, for the days")
    if narrow is not None:
        lines.append(f"trainer: {{product_format: {narrow.value}}} # of products with weights")
    shown = [text for text in assumed.values() if text]
    return "\n".join(lines) + "\n", (", ".join(shown),) if shown else ()


def _named(kind: type[_T], option: str, text: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise InputError(Fault(field=option, message=_one_of(text, [*kind]))) from None


def _one_of(text: str, known: Sequence[str]) -> str:
    return f"found {text[:60]!a}; write one of {', '.join(known)}"
