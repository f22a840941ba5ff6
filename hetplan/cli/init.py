"""`hetplan init`: a cluster, a model and a job file to begin with, from options or by questions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from hetplan.cli.one_line import (
    batch_option,
    between_option,
    model_option,
    nodes_option,
    seq_option,
    tokens_meant,
    tokens_option,
)
from hetplan.cli.options import INTERRUPTED, emit, say

if TYPE_CHECKING:
    from hetplan.drafting.draft import Drafted, JobWords
    from hetplan.search.result import Inputs

_T = TypeVar("_T")
MAX_LINES = 10
_INPUTS = ("model", "cluster", "job")


def init(
    nodes: Annotated[list[str] | None, nodes_option()] = None,
    between: Annotated[list[str] | None, between_option()] = None,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hostfile or Slurm list: names of nodes.")
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]FILE", help="Driver's topology of a node, KIND as in --nodes."
        ),
    ] = None,
    model: Annotated[str | None, model_option()] = None,
    batch: Annotated[int | None, batch_option()] = None,
    seq: Annotated[int | None, seq_option()] = None,
    tokens: Annotated[str | None, tokens_option()] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="Trainer that will run the plan.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="bf16, fp16, fp32 or fp8.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="adam or sgd.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Write over files that exist.")] = False,
) -> None:
    """Write a cluster, a model and a job file.

    As in: hetplan init --nodes "4x8 h100 @A" "8x8 mi300x @B" --between "A B 10Gbit 30ms"
    --model llama-3-70b --tokens 2T --batch 1024 --seq 4096 --out my-cluster

    Without --nodes or --model it asks, on a terminal. What nobody says is assumed, and marked in
    the files with `# assumed:`.
    """
    from hetplan.drafting.draft import JobWords

    words = JobWords(
        batch=batch,
        sequence=seq,
        tokens=tokens_meant(tokens),
        target=target,
        precision=precision,
        optimizer=optimizer,
    )
    answers = Answers(
        nodes=nodes or [], between=between or [], model=model or "", words=words,
        hosts=hosts, topologies=tuple(topology or ()),
    )  # fmt: skip
    if not nodes or not model:
        answers = _asked(answers)
    files, inputs = draft(answers)
    _write(files, out, force)
    for line in _lines(files, inputs, out):
        emit(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the user says."""

    nodes: list[str]
    between: list[str]
    model: str
    words: JobWords
    hosts: Path | None = None
    topologies: tuple[str, ...] = ()


def draft(answers: Answers) -> tuple[tuple[Drafted, Drafted, Drafted], Inputs]:
    """Model, cluster and job, and what a planner reads in them; an InputError with every fault."""
    from hetplan.cli.options import read_inputs, read_predictor
    from hetplan.cluster.load import load_cluster
    from hetplan.drafting.draft import drafted_cluster, drafted_job, drafted_model
    from hetplan.drafting.seen import Seen
    from hetplan.errors import FaultList, InputError
    from hetplan.model.load import load_model
    from hetplan.trainers.before_search import lacks_figures, unknown_kinds

    faults = FaultList()
    seen = faults.of(Seen.read, answers.hosts, answers.topologies)
    faults.stop()
    cluster = faults.of(drafted_cluster, answers.nodes, answers.between, seen)
    model = faults.of(drafted_model, answers.model)
    spec = None if model is None else faults.of(load_model, model.document)
    if cluster is None or model is None or spec is None:
        raise InputError(*faults.found)
    job = drafted_job(answers.words, spec, load_cluster(cluster.document))
    inputs = read_inputs(model.document, cluster.document, job.document)
    if lacks_figures(inputs):
        predictor, _ = read_predictor(None, None)
        unknown = tuple(unknown_kinds(inputs, predictor, cluster.document))
        if unknown:
            raise InputError(*unknown)
    return (model, cluster, job), inputs


def _place(out: Path, file: Drafted) -> Path:
    return out / file.document.file.removeprefix("drafted ")


def _write(files: tuple[Drafted, ...], out: Path, force: bool) -> None:
    """All files or none."""
    from hetplan.files.locks import Lock
    from hetplan.files.writing import check_new, make_folder, write_together

    make_folder(out)
    with Lock(out).take():
        for file in files:
            check_new(_place(out, file), force=force)
        write_together({_place(out, file): file.document.text for file in files})


def _lines(files: tuple[Drafted, ...], inputs: Inputs, out: Path) -> list[str]:
    """What was written, what was assumed and what comes next, in at most MAX_LINES."""
    from hetplan.reports.terminal import folded, text_width

    model, cluster, job = inputs.model, inputs.cluster, inputs.job
    texts = (
        f"{model.name}, {_billions(model.parameter_count)} parameters",
        ", ".join(f"{each.num_devices} {each.name}" for each in cluster.islands),
        f"{job.global_batch_size:,} x {job.sequence_length:,} tokens a step, "
        f"{job.precision}, {job.target}",
    )
    places = [shlex.quote(str(_place(out, file))) for file in files]
    wrote = [f"wrote {place}: {text}" for place, text in zip(places, texts, strict=True)]
    assumed = [
        [*folded([f"assumed: {text}"], text_width())] for file in files for text in file.assumed
    ]
    room = MAX_LINES - len(wrote) - 1
    fits = [at for at in range(len(assumed) + 1) if sum(map(len, assumed[:at])) <= room]
    shown = [line for lines in assumed[: fits[-1]] for line in lines]
    if fits[-1] < len(assumed):
        shown = [line for lines in assumed[: fits[-1] - 1] for line in lines]
        shown.append(f"assumed: {len(assumed) - fits[-1] + 1} more, marked in the files")
    plan = shlex.quote(str(out / "plan.json"))
    options = (f"--{name} {place}" for name, place in zip(_INPUTS, places, strict=True))
    return [*wrote, *shown, f"next: hetplan plan {' '.join(options)} --out {plan}"]


def _billions(count: int) -> str:
    from hetplan.units import digits

    return f"{digits(count / 1e9)}B" if count >= 1e9 else f"{digits(count / 1e6)}M"


# Questions


def _asked(answers: Answers) -> Answers:
    """The answers with what is missing asked for, on a terminal; an InputError elsewhere."""
    from hetplan.errors import InputError

    seen = _seen_here()
    if not _on_terminal():
        example = seen or "4x8 h100 @A"
        here = f" This machine looks like --nodes {seen!r}." if seen else ""
        raise InputError(
            f'give --nodes and --model, as in: hetplan init --nodes "{example}" --model '
            f"llama-3-70b --batch 1024 --seq 4096 --out my-cluster.{here}"
        )
    try:
        return _ask_all(answers, seen)
    except typer.Abort:
        say("")
        say("nothing was written")
        raise typer.Exit(INTERRUPTED) from None


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _seen_here() -> str:
    """The accelerators of this machine as `--nodes` has them; empty where there are none."""
    from hetplan.cluster.catalogue import load_catalogue
    from hetplan.errors import HetplanError
    from hetplan.machine.devices import find_devices
    from hetplan.machine.host import Probe, run_program

    try:
        found = find_devices(Probe(run=run_program), (), load_catalogue(), [])
    except (HetplanError, OSError):
        return ""
    known = max((each for each in found if each.kind), key=lambda each: each.count, default=None)
    return f"1x{known.count} {known.kind}" if known is not None else ""


def _ask(question: str, default: str, read: Callable[[str], _T]) -> _T:
    """The answer, asked again while it is wrong."""
    from hetplan.errors import InputError

    def checked(text: str) -> _T:
        try:
            return read(text.strip())
        except InputError as error:
            raise typer.BadParameter("; ".join(each.message for each in error.faults)) from error

    shown = bool(default)
    answer: _T = typer.prompt(
        question, default=default, value_proc=checked, err=True, show_default=shown
    )
    return answer


def _ask_all(answers: Answers, seen: str) -> Answers:
    """Every question whose option was not given."""
    from dataclasses import replace

    from hetplan.drafting.cluster import draft_cluster_text
    from hetplan.drafting.draft import DEFAULT_BATCH, DEFAULT_SEQUENCE
    from hetplan.drafting.model import meant_model
    from hetplan.drafting.words import between_words, nodes_words
    from hetplan.errors import InputError
    from hetplan.model.load import load_model
    from hetplan.units import parse_count

    def a_count(text: str) -> int | None:
        count = parse_count(text) if text else None
        if count == 0:
            raise InputError("found 0; it must be at least 1")
        return count

    def some_nodes(text: str) -> str:
        if text:
            _nodes_alone(text)
        return text

    nodes, between, words = list(answers.nodes), list(answers.between), answers.words
    if not nodes:
        example = seen or "4x8 h100 @A"
        nodes.append(_ask("Nodes x devices, kind and region", example, _nodes_alone))
        while more := _ask("More nodes, or Enter", "", some_nodes):
            nodes.append(more)
    regions = list(dict.fromkeys(nodes_words(text).region for text in nodes))
    if len(regions) > 1 and not between:
        for at, two in enumerate(regions):
            for one in regions[:at]:
                link = _ask(
                    f"Bandwidth and round trip between {one} and {two}",
                    "10Gbit 30ms",
                    lambda text, ends=f"{one} {two}": between_words(f"{ends} {text}").text,  # type: ignore[misc]
                )
                between.append(link)
    draft_cluster_text(nodes, between)  # what is wrong with all of it together ends the questions
    model = answers.model or _ask(
        "Model: name, file or config.json",
        "llama-3-70b",
        lambda text: (load_model(meant_model(text).path), text)[1],
    )
    longest = load_model(meant_model(model).path).max_sequence_length
    if words.batch is None:
        words = replace(words, batch=_ask("Sequences a step", str(DEFAULT_BATCH), a_count))
    if words.sequence is None:
        usual = str(min(DEFAULT_SEQUENCE, longest))
        words = replace(words, sequence=_ask("Tokens a sequence", usual, a_count))
    if words.tokens is None:
        words = replace(words, tokens=_ask("Tokens of the run, or Enter", "", a_count))
    return replace(answers, nodes=nodes, between=between, model=model, words=words)


def _nodes_alone(text: str) -> str:
    """The text, where it describes an island."""
    from hetplan.drafting.cluster import draft_cluster_text

    draft_cluster_text([text], ())
    return text
