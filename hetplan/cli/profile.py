"""`hetplan profile`: measure layers, operators and links, and see what a store has and lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from hetplan.cli.options import INTERRUPTED, AsJson, Verbose, emit, positive_numbers, say

if TYPE_CHECKING:
    from enum import StrEnum

    from hetplan.profiling.grid import ShapeOptions
    from hetplan.profiling.run import Measuring

_EnumT = TypeVar("_EnumT", bound="StrEnum")

app = typer.Typer(help="Measure layers, operators and links.", no_args_is_help=True)

_WHAT, _HOW = "What is measured", "How it is measured"
DEFAULT_BUDGET = "10min"  # what a person waits for beside other work
MERGE_SCHEMA = "hetplan.merge/2"

Model = Annotated[
    Path | None, typer.Option("--model", help="Model file; with --job.", rich_help_panel=_WHAT)
]
JobFile = Annotated[
    Path | None,
    typer.Option(
        "--job", help="Job file: measure the shapes its plans can use.", rich_help_panel=_WHAT
    ),
]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="Cluster file: where.")]
Microbatch = Annotated[
    str | None,
    typer.Option("--microbatch", help="Microbatch sizes, as in 1,2,4.", rich_help_panel=_WHAT),
]
Tp = Annotated[
    str | None,
    typer.Option("--tp", help="Tensor-parallel degrees, as in 1,2.", rich_help_panel=_WHAT),
]
Hidden = Annotated[
    str | None,
    typer.Option(
        "--hidden",
        help="Without a model file: hidden sizes, as in 256,384; also --seq 1024 --vocab 32000 "
        "--precision bfloat16.",
        rich_help_panel=_WHAT,
    ),
]
Seq = Annotated[str | None, typer.Option("--seq", help="Sequence lengths.", hidden=True)]
Vocab = Annotated[int | None, typer.Option("--vocab", help="Vocabulary.", hidden=True)]
PrecisionNames = Annotated[
    str | None, typer.Option("--precision", help="float32, bfloat16, float16.", hidden=True)
]
Store = Annotated[
    Path | None,
    typer.Option("--store", help="Profile store. Default: your own.", rich_help_panel=_HOW),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda (ROCm too), npu, mlu, ... Default: an accelerator where there is one.",
        rich_help_panel=_HOW,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        help="Device kind of the samples. Default: from the device.",
        rich_help_panel=_HOW,
    ),
]
Threads = Annotated[
    int,
    typer.Option("--threads", help="CPU threads; a rank of a plan is one core.", hidden=True),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Time to spend, as in 10min or 90s; cheapest shapes first.",
        rich_help_panel=_HOW,
    ),
]
Again = Annotated[
    bool,
    typer.Option(
        "--again",
        help="Measure what the store already has, and keep both.",
        rich_help_panel=_HOW,
    ),
]


@app.command()
def layers(
    model: Model = None,
    job: JobFile = None,
    hidden: Hidden = None,
    microbatch: Microbatch = None,
    tp: Tp = None,
    store: Store = None,
    budget: Budget = None,
    device: Device = None,
    kind: Kind = None,
    pace: Annotated[
        Path | None,
        typer.Option(help="Pace file: play the device --kind, on this CPU.", rich_help_panel=_HOW),
    ] = None,
    again: Again = False,
    seq: Seq = None,
    vocab: Vocab = None,
    precision: PrecisionNames = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure whole layers and the optimizer's update on this device.

    Under torchrun all processes measure at the same time, as in training, and the first one's
    times are kept. Can be interrupted: the same command goes on from there.
    """
    from hetplan.cli.profile_show import show_samples
    from hetplan.errors import InputError
    from hetplan.profiling.pacing import load_pace
    from hetplan.profiling.run import profile_layers

    if pace is not None and model is None:
        raise InputError("--pace needs the --model and --job that its times are of")
    shapes = _shapes(model, job, hidden, microbatch, tp, seq, vocab, precision, pace is None)
    paced = load_pace(pace).choose(kind) if pace is not None else None
    with _measuring(store, device, kind, threads, budget, again) as measuring:
        from dataclasses import replace

        profiles = profile_layers(replace(measuring, pace=paced), shapes)
    if profiles is not None:
        show_samples(profiles, as_json=as_json)


@app.command()
def operators(
    model: Model = None,
    job: JobFile = None,
    hidden: Hidden = None,
    microbatch: Microbatch = None,
    tp: Tp = None,
    store: Store = None,
    budget: Budget = None,
    device: Device = None,
    kind: Kind = None,
    again: Again = False,
    seq: Seq = None,
    vocab: Vocab = None,
    precision: PrecisionNames = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the operators that layers are made of, each alone."""
    from hetplan.cli.profile_show import show_samples
    from hetplan.profiling.run import profile_operators

    shapes = _shapes(model, job, hidden, microbatch, tp, seq, vocab, precision, True)
    with _measuring(store, device, kind, threads, budget, again) as measuring:
        profiles = profile_operators(measuring, shapes)
    show_samples(profiles, as_json=as_json)


@app.command()
def links(
    name: Annotated[str, typer.Argument(help="Name of the link, as in a cluster file.")],
    model: Model = None,
    job: JobFile = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Message sizes, as in 4KiB,1MiB.", rich_help_panel=_WHAT),
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Group sizes, as in 2,4.", rich_help_panel=_WHAT)
    ] = None,
    store: Store = None,
    device: Device = None,
    kind: Kind = None,
    again: Again = False,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the link between the processes of a torchrun job.

    torchrun --standalone --nproc-per-node 2 -m hetplan profile links NAME
    """
    from hetplan.cli.profile_show import show_samples
    from hetplan.profiling.run import profile_link

    shapes = _shapes(model, job)
    with _measuring(store, device, kind, threads, None, again) as measuring:
        profiles = profile_link(
            measuring,
            name,
            shapes,
            sizes=_byte_sizes(sizes),
            groups=positive_numbers("--groups", groups),
        )
    if profiles is not None:
        show_samples(profiles, as_json=as_json)


@app.command("list")
def list_(
    model: Model = None,
    job: JobFile = None,
    cluster: Cluster = None,
    microbatch: Microbatch = None,
    tp: Tp = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """List what a store holds; with --model and --job, also what they still need measured."""
    from hetplan.cli.profile_show import CommandInputs, list_store
    from hetplan.files.shipped import default_store

    shapes = _shapes(model, job, None, microbatch, tp)
    files = CommandInputs(model=model, job=job, cluster=cluster, store=store)
    list_store(store or default_store(), shapes, files, as_json=as_json)


@app.command("for-job")
def for_job(
    model: Annotated[Path, typer.Option(help="Model file.")],
    cluster: Annotated[Path, typer.Option(help="Cluster file.")],
    job: Annotated[Path, typer.Option(help="Job file.")],
    budget: Budget = DEFAULT_BUDGET,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the order.")] = False,
    store: Store = None,
    device: Device = None,
    kind: Kind = None,
    threads: Threads = 1,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Measure first what shrinks the interval of a job's best plans most."""
    from hetplan.advice.local import LocalBackend, measure_for
    from hetplan.cli.options import read_inputs
    from hetplan.cli.profile_advice import say_begin, show_order, show_report
    from hetplan.cli.profile_show import CommandInputs
    from hetplan.errors import InputError
    from hetplan.files.shipped import default_stores
    from hetplan.profiling.run import processes_together

    if processes_together() > 1:
        raise InputError("for-job starts the ranks of a link itself; run it without torchrun")
    inputs = read_inputs(model, cluster, job)
    folders = (store,) if store is not None else default_stores()
    files = CommandInputs(model=model, job=job, cluster=cluster, store=store)
    with _measuring(store, device, kind, threads, budget, False) as measuring:
        if dry_run:
            backend = LocalBackend(measuring, inputs, folders)
            backend.measure_unknown_kinds(measuring.budget_seconds, only_look=True)
            view = backend.look()
            show_order(
                files, view, inputs, measuring.budget_seconds, verbose=verbose, as_json=as_json
            )
            return
        report = measure_for(measuring, inputs, folders, on_begin=say_begin if verbose else None)
    show_report(files, report, inputs, verbose=verbose, as_json=as_json)


@app.command()
def script(
    cluster: Annotated[Path, typer.Option(help="Cluster file: kinds and links.")],
    model: Model = None,
    job: JobFile = None,
    hidden: Hidden = None,
    microbatch: Microbatch = None,
    tp: Tp = None,
    out: Annotated[Path, typer.Option(help="The program to write.")] = Path("measure.py"),
    seq: Seq = None,
    vocab: Vocab = None,
    precision: PrecisionNames = None,
) -> None:
    """Write measure.py, which needs Python 3.8 and torch 2.1, for machines without hetplan."""
    import shlex

    from hetplan.cluster.load import load_cluster
    from hetplan.profiling.script import write_script

    shapes = _shapes(model, job, hidden, microbatch, tp, seq, vocab, precision)
    task = write_script(out, load_cluster(cluster), shapes)
    for kind in task["kinds"]:
        for what in ("layers", "operators"):
            emit(f"on one {kind}: python {out.name} {what} --kind {kind}")
    for name in task["links"]:
        emit(
            f"on both ends of {name}: torchrun ... --nproc-per-node N {out.name} links "
            f"--link {shlex.quote(name)}"
        )
    say(f"wrote {out}; then: hetplan profile merge samples-*.csv")


@app.command()
def merge(
    paths: Annotated[list[Path], typer.Argument(help="Files of measure.py, or folders of them.")],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Add what measure.py measured to a store."""
    from hetplan.files.encoding import encode
    from hetplan.files.shipped import default_store
    from hetplan.profiling.script import merge_files
    from hetplan.units import counted

    folder = store or default_store()
    report = merge_files(paths, folder)
    if as_json:
        emit(encode(report, schema=MERGE_SCHEMA))
        return
    held = f", {report.held} were there already" if report.held else ""
    added, files = counted(report.added, "sample"), counted(report.files, "file")
    emit(f"{added} added to {folder} from {files}{held}")
    for fault in report.refused:
        emit(f"refused: {fault}")
    for failure in report.failures:
        emit(f"not measurable: {failure}")


@contextmanager
def _measuring(
    store: Path | None,
    device: str | None,
    kind: str | None,
    threads: int,
    budget: str | None,
    again: bool,
) -> Iterator[Measuring]:
    """Where and how to measure, with progress on stderr; Ctrl-C says that nothing is lost."""
    import shlex
    import sys

    from hetplan.cluster.names import measured_kind
    from hetplan.files.shipped import default_store
    from hetplan.profiling.run import Measuring
    from hetplan.reports.terminal import ProgressLine

    kind = None if kind is None else measured_kind(kind)
    try:
        with ProgressLine("measuring") as line:
            yield Measuring(
                store=store or default_store(),
                device=device,
                kind=kind,
                threads=threads,
                budget_seconds=_seconds(budget),
                again=again,
                command=shlex.join(["hetplan", *sys.argv[1:]]),
                progress=line.show,
                tell=say,
            )
    except KeyboardInterrupt:
        say("interrupted; what was measured is kept, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def _shapes(
    model: Path | None,
    job: Path | None,
    hidden: str | None = None,
    microbatch: str | None = None,
    tp: str | None = None,
    seq: str | None = None,
    vocab: int | None = None,
    precision: str | None = None,
    neighbours: bool = True,
) -> ShapeOptions:
    from hetplan.errors import InputError
    from hetplan.job.load import load_job
    from hetplan.job.spec import Precision
    from hetplan.model.load import load_model
    from hetplan.profiling.grid import ShapeOptions

    if vocab is not None and vocab < 1:
        raise InputError(f"--vocab is {vocab}; it must be at least 1")
    names = precision.split(",") if precision else []
    return ShapeOptions(
        model=None if model is None else load_model(model),
        job=None if job is None else load_job(job),
        hidden_sizes=positive_numbers("--hidden", hidden),
        sequence_lengths=positive_numbers("--seq", seq),
        vocab_size=vocab,
        microbatch_sizes=positive_numbers("--microbatch", microbatch),
        tp_degrees=positive_numbers("--tp", tp),
        precisions=tuple(_choice("--precision", name.strip(), Precision) for name in names),
        neighbours=neighbours,
    )


def _seconds(text: str | None) -> float:
    """Seconds of a budget such as `10min`, `90s`, `1h` or `90`; no end without one."""
    from hetplan.errors import InputError
    from hetplan.units import Dimension, parse_quantity

    if text is None:
        return float("inf")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_quantity(text, Dimension.TIME)
        except InputError as error:
            raise InputError(f"--budget: {error}") from None
    if not 0 < seconds < float("inf"):
        raise InputError(f"--budget is {text}; it is a time to spend, as in 10min, 90s or 1h")
    return seconds


def _byte_sizes(text: str | None) -> tuple[int, ...]:
    """Numbers of bytes separated by commas, plain or with a unit, smallest first."""
    from hetplan.errors import InputError
    from hetplan.units import Dimension, parse_quantity

    sizes = set()
    for part in (part.strip() for part in text.split(",")) if text is not None else ():
        try:
            quantity = f"{part} B" if part.isdecimal() else part
            sizes.add(round(parse_quantity(quantity, Dimension.MEMORY)))
        except InputError as error:
            raise InputError(f"--sizes: {error}") from error
    return tuple(sorted(sizes))


def _choice(option: str, text: str, of: type[_EnumT]) -> _EnumT:
    from hetplan.errors import InputError

    try:
        return of(text)
    except ValueError:
        raise InputError(f"{option} is {text}; it is one of {', '.join(of)}") from None
