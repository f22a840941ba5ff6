"""Options that say a cluster and a job in one line, instead of files: `plan` and `estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hetplan.cli.options import read_inputs, say

if TYPE_CHECKING:
    from hetplan.files.reading import Document
    from hetplan.files.settings import Setting
    from hetplan.search.result import Inputs

WITHOUT_FILES = {"rich_help_panel": "Without files"}
MAX_ASSUMED = 5


def model_option() -> Any:
    """`--model`."""
    return typer.Option(metavar="FILE|NAME", help="Model file, config.json, or llama-3-70b.")


def nodes_option(**shown: Any) -> Any:
    """`--nodes`; `shown`: how the help shows it."""
    text = 'Nodes of each kind, as in "4x8 h100 @A"; may be repeated.'
    return typer.Option("--nodes", metavar="TEXT", help=text, **shown)


def between_option(**shown: Any) -> Any:
    """`--between`."""
    text = 'Links of regions, as in "A B 10Gbit 30ms".'
    return typer.Option("--between", metavar="TEXT", help=text, **shown)


def batch_option(**shown: Any) -> Any:
    """`--batch`."""
    return typer.Option(
        "--batch", metavar="N", min=1, help="Sequences of an optimizer step.", **shown
    )


def seq_option(**shown: Any) -> Any:
    """`--seq`."""
    return typer.Option("--seq", metavar="N", min=1, help="Tokens of a sequence.", **shown)


def tokens_option(**shown: Any) -> Any:
    """`--tokens`."""
    text = "Tokens of the whole run, as in 2T."
    return typer.Option("--tokens", metavar="N", help=text, **shown)


def tokens_meant(text: str | None) -> int | None:
    """`2T` as a number; an InputError that names the option."""
    from hetplan.errors import Fault, InputError
    from hetplan.units import parse_count

    if text is None:
        return None
    try:
        return parse_count(text)
    except InputError as error:
        raise InputError(Fault(field="--tokens", message=str(error))) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLine:
    """What the options say without a file; None: not given."""

    nodes: list[str] | None
    between: list[str] | None
    batch: int | None
    sequence: int | None
    tokens: str | None = None


def question_of(
    model: str,
    cluster: Path | None,
    job: Path | None,
    line: OneLine,
    *,
    settings: tuple[Setting, ...],
    target: str | None,
    searched: bool = True,
) -> tuple[Inputs, Path | Document]:
    """What the options ask, and where its cluster is: a file, or a document that nobody wrote.

    What is assumed is told on stderr. Searched: as of `read_inputs`.
    """
    from hetplan.cluster.load import load_cluster
    from hetplan.drafting.draft import JobWords, drafted_cluster, drafted_job
    from hetplan.drafting.model import meant_model
    from hetplan.errors import InputError
    from hetplan.model.load import load_model

    if line.nodes and cluster is not None:
        raise InputError("--nodes and --cluster both say what the cluster is; give one of them")
    if line.between and not line.nodes:
        raise InputError("--between is of the nodes of --nodes; a cluster file has its own links")
    if not line.nodes and cluster is None:
        raise InputError('give --cluster FILE, or --nodes "4x8 h100 @A"')
    if job is None and line.batch is None:
        raise InputError("give --job FILE, or --batch N (sequences of a step) and --seq N")
    meant = meant_model(model)
    assumed = [meant.note] if meant.note else []
    where: Path | Document | None = cluster
    if where is None:
        drafted = drafted_cluster(line.nodes or (), line.between or ())
        where = drafted.document
        assumed += drafted.assumed
    asked: Path | Document | None = job
    if asked is None:
        said = {
            each.path[0]: str(each.value)
            for each in settings
            if len(each.path) == 1 and each.value is not None
        }
        words = JobWords(
            batch=line.batch,
            sequence=line.sequence,
            tokens=tokens_meant(line.tokens),
            target=target or said.get("target"),
            precision=said.get("precision"),
            optimizer=said.get("optimizer"),
        )
        drafted = drafted_job(words, load_model(meant.path), load_cluster(where))
        asked = drafted.document
        assumed += drafted.assumed
    else:
        settings = (*_over_job(line), *settings)
    tell_assumed(assumed)
    inputs = read_inputs(meant.path, where, asked, target, settings=settings, searched=searched)
    return inputs, where


def _over_job(line: OneLine) -> tuple[Setting, ...]:
    """`--batch`, `--seq` and `--tokens` over the job's file."""
    from hetplan.files.settings import Setting

    values = (
        ("--batch", "global_batch_size", line.batch),
        ("--seq", "sequence_length", line.sequence),
        ("--tokens", "total_tokens", tokens_meant(line.tokens)),
    )
    return tuple(
        Setting(option=option, path=(key,), value=value)
        for option, key, value in values
        if value is not None
    )


def tell_assumed(assumed: Sequence[str]) -> None:
    """What nobody said, on stderr."""
    from hetplan.reports.terminal import folded, text_width

    lines = [f"assumed: {text}" for text in assumed[:MAX_ASSUMED]]
    if len(assumed) > MAX_ASSUMED:
        lines.append(f"assumed: {len(assumed) - MAX_ASSUMED} more; `hetplan init` writes them down")
    for line in folded(lines, text_width()):
        say(line)
