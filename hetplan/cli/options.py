"""Options that several commands share, and how their values are read.

Only the standard library and typer are imported here: `hetplan --help` must answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from hetplan.comparison.compare import ComparedRun
    from hetplan.errors import Fault
    from hetplan.files.reading import Document
    from hetplan.files.settings import Setting
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import Inputs, SearchResult
    from hetplan.units import Dimension

_S = TypeVar("_S")
_T = TypeVar("_T")

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""

MAX_FAULTS = 100
"""Faults that are printed: a generated file may have a million."""
PREDICTION = "Measurements"

PredictorFile = Annotated[
    Path | None,
    typer.Option(
        "--predictor",
        metavar="FILE",
        help="Predictor that `hetplan fit` wrote; skips the fit.",
        rich_help_panel=PREDICTION,
    ),
]
Stores = Annotated[
    list[Path] | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="Profile store; may be repeated. Default: your own store, then the shipped profiles.",
        rich_help_panel=PREDICTION,
    ),
]
HiddenStores = Annotated[
    list[Path] | None,
    typer.Option("--store", metavar="DIR", hidden=True, help="Profile store; may be repeated."),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="NAME", help="Trainer that will run the plan; replaces the job's."
    ),
]


def complete_job_keys(incomplete: str) -> list[str]:
    """Keys of a job file that begin with what was typed, for the shell."""
    from hetplan.job.load import job_keys

    return [f"{key}=" for key in job_keys() if key.startswith(incomplete)]


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the job file, as in --set pin.tp=8 --set time_limit=30s; may be "
        "repeated.",
        rich_help_panel="Over the job file",
        autocompletion=complete_job_keys,
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time limit of the command, as in '60 s', without loading and compiling.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", hidden=True, help="Timeline to write, for ui.perfetto.dev."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print everything that is known of the result.")
]


def moment_of(time_limit: str | None) -> float:
    """When a command of this limit ends (`hetplan.deadline`)."""
    from hetplan.deadline import moment_in
    from hetplan.units import Dimension

    return moment_in(quantity("--time-limit", time_limit, Dimension.TIME))


def quantity(option: str, text: str | None, dimension: Dimension) -> float | None:
    """What an option says, in SI; None where it is not given."""
    from hetplan.errors import Fault, InputError
    from hetplan.units import parse_quantity

    try:
        return None if text is None else parse_quantity(text, dimension)
    except InputError as error:
        raise InputError(Fault(field=option, message=str(error))) from error


def say_left_out(*what: str) -> None:
    """One line for all that a limit left no time for."""
    if what:
        say(f"left out for the time limit: {', '.join(what)}")


def say(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_lines(lines: Sequence[str], *, most: int | None = None, more: str = "") -> None:
    """Sentences on stderr, folded to the terminal: the first `most`, and how many are left out.

    `more` says where those are.
    """
    from hetplan.reports.terminal import folded, text_width

    shown = lines[:most]
    for line in folded(shown, text_width()):
        say(line)
    if len(lines) > len(shown):
        say(f"{len(lines) - len(shown)} more: {more}")


def note(text: str) -> None:
    """Something to know about a result, on stderr."""
    from hetplan.errors import Fault, Severity

    tell(Fault(severity=Severity.NOTE, message=text))


def tell(*faults: Fault) -> None:
    """What is wrong or doubtful, on stderr, one line per fault."""
    from hetplan.errors import Severity

    for fault in faults[:MAX_FAULTS]:
        prefix = "hetplan" if fault.severity is Severity.ERROR else fault.severity.value
        say(f"{prefix}: {fault}")
    if len(faults) > MAX_FAULTS:
        say(f"hetplan: and {len(faults) - MAX_FAULTS:,} more like these")


def emit(text: str) -> None:
    """A result, on stdout; nowhere where the caller closed it."""
    if sys.stdout is None:
        return
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def emit_lines(lines: Iterable[str]) -> None:
    """Sentences of a result, on stdout, folded to the terminal."""
    from hetplan.reports.terminal import folded, text_width

    for line in folded(lines, text_width()):
        emit(line)


def show_summary(
    result: SearchResult, *, verbose: bool, predictor: Predictor | None = None
) -> None:
    """The ten lines of a plan; verbose: each stage, each component and every note below them, with
    the plan's predictor its stages' clocks too.
    """
    from hetplan.reports.summary import summarize
    from hetplan.reports.terminal import text_width

    for line in summarize(result).lines(text_width()):
        emit(line)
    if not verbose:
        return
    from hetplan.reports.plans import STAGE_WORDS, component_table, detail_lines, stage_table
    from hetplan.reports.terminal import print_small

    emit("")
    emit_lines([STAGE_WORDS])
    print_small(stage_table(result.inputs.model, result.plan, result.estimate))
    emit("")
    print_small(component_table(result.estimate))
    emit("")
    emit_lines(detail_lines(result))
    if predictor is not None:
        from hetplan.reports.energy import clock_lines

        emit_lines(clock_lines(result, predictor))


def check_replaceable(out: Path, schema: str, what: str) -> str:
    """What `writing.check_replaceable` says of a JSON file of this schema."""
    import json

    from hetplan.files import writing

    def is_one(held: bytes) -> bool:
        try:
            document = json.loads(held)
        except (ValueError, RecursionError):
            return False
        found = document.get("schema") if isinstance(document, dict) else None
        return str(found).partition("/")[0] == schema.partition("/")[0]

    return writing.check_replaceable(out, what, is_one)


def job_settings(settings: Sequence[str] | None, **shortcuts: object) -> tuple[Setting, ...]:
    """The values of `--set` and of its shortcuts, as in `gap=0.02` for `--gap 0.02`.

    A key inside another one has a dot, as in `**{"pin.tp": 8}` for `--tp 8`.
    """
    from hetplan.files.settings import Setting, parse_setting

    return (
        *(parse_setting(text) for text in settings or ()),
        *(
            Setting(option=_shortcut(key), path=tuple(key.split(".")), value=value)
            for key, value in shortcuts.items()
            if value is not None
        ),
    )


def _shortcut(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


def read_inputs(
    model: Path | Document,
    cluster: Path | Document,
    job: Path | Document,
    target: str | None = None,
    *,
    settings: tuple[Setting, ...] = (),
    searched: bool = True,
) -> Inputs:
    """The three files as `load_inputs` reads them, with `--target` over the job's.

    Searched: an InputError where the trainer cannot run any plan of them.
    """
    from hetplan.cluster.names import guessed_kinds
    from hetplan.errors import InputError
    from hetplan.files.reading import read_document
    from hetplan.files.settings import with_settings
    from hetplan.search.files import load_inputs
    from hetplan.trainers.before_search import question_faults

    settings = (*settings, *job_settings(None, target=target))
    inputs = load_inputs(model, cluster, job, settings=settings, searched=searched)
    document = with_settings(read_document(job), settings)
    faults = tuple(question_faults(inputs, document)) if searched else ()
    if faults:
        raise InputError(*faults)
    tell(*guessed_kinds(read_document(cluster)))
    return inputs


def stores_to_read(stores: list[Path] | None) -> tuple[Path, ...]:
    """The folders named, or the user's store (where there is one) and the shipped profiles."""
    from hetplan.files.shipped import default_stores

    return tuple(stores) if stores else default_stores()


def read_predictor(predictor: Path | None, stores: list[Path] | None) -> tuple[Predictor, str]:
    """The predictor of the file, or one fitted from the stores; and the sha256 of its text.

    Kinds that neither has are known by what others measured.
    """
    from hetplan.errors import InputError
    from hetplan.predict.fit import predictor_of_files

    if predictor is not None and stores:
        raise InputError("--predictor skips the fit, --store is what would be fitted: give one")
    return predictor_of_files(predictor, () if predictor else stores_to_read(stores))


def positive_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Positive whole numbers separated by commas, smallest first; none where nothing was given."""
    from hetplan.errors import InputError

    parts = [part.strip() for part in text.split(",")] if text is not None else []
    wrong = [part for part in parts if not part.isdecimal() or not int(part)]
    if wrong:
        raise InputError(f"{option} is {text}; found {wrong[0]!r}, write as in {option} 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def name_values(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`NAME=VALUE` of a launch's variables and flags, as `--set` takes them there."""
    from hetplan.errors import InputError

    pairs = []
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--")
        if not name or not equals:
            raise InputError(f"--set {word[:60]!a}: write NAME=VALUE, as in --set TP=8")
        pairs.append((name, value))
    return tuple(pairs)


def write_trace(
    out: Path | None,
    result: SearchResult,
    predictor: Predictor,
    runs: Sequence[ComparedRun] = (),
) -> None:
    """The result's timeline and those of runs of it, where a file is named for them."""
    from hetplan.cost.step_model.pricer import Pricer
    from hetplan.errors import InputError
    from hetplan.files.writing import write_atomically
    from hetplan.reports.trace import trace_text

    if out is None:
        return
    inputs = result.inputs
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    try:
        text = trace_text(result.plan, pricer, runs)
    except InputError as error:  # the rest of the answer is not lost for it
        note(f"{out} is not written: {error}")
        return
    write_atomically(out, text)
    say(f"wrote {out}")
