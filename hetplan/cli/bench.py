"""`hetplan bench`: how fast and how right hetplan's own parts are, measured here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import AsJson, emit, say

BENCHMARKS = ("cost", "accuracy", "search", "hethub", "closed-loop")
BENCH_SCHEMA = "hetplan.bench/1"
USUAL_REFERENCE = Path("../shared/reference")
"""Where the folder of other people's measurements lies beside a checkout, if it is there."""


def bench(
    what: Annotated[str, typer.Argument(help=f"Which benchmark: {', '.join(BENCHMARKS)}.")],
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Folder of other people's measurements, for the errors on them. Default: "
            f"{USUAL_REFERENCE} where it is there; otherwise those tables are left out."
        ),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="cost: random pipelines per row of bounds and anomalies (default 1000). search: "
            "file of peer cases. Default: peers/sailor_cases.json of --reference."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="search: numbers of devices of the scaling table, with commas; `none` leaves it "
            "out. Default: all."
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="search, hethub: targets of the table, with commas. Default: all that train."
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="search: longest search of the scaling table (180 s). hethub: of every plan (the "
            "jobs' own limit)."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(help="accuracy: folder whose unit data are fitted. Default: --reference."),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            help="accuracy: folder whose runs and unit data are predicted, none of which is "
            "fitted. Default: the folder that is fitted, whose unit data are then left out in turn."
        ),
    ] = None,
    readings: Annotated[
        bool,
        typer.Option(
            "--readings",
            help="accuracy: predict the runs under other readings of their clusters too, which "
            "takes about three times as long.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="accuracy, closed-loop: draw predicted against measured steps into this SVG file. "
            "search: draw the scaling table."
        ),
    ] = None,
    plans: Annotated[
        int | None, typer.Option(help="closed-loop: plans that are trained (20).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="closed-loop: of the choice of plans and the jitter (0).")
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(help="closed-loop: of the second pass, a fraction; 0 leaves it out (0.05)."),
    ] = None,
    kinds_alone: Annotated[
        bool,
        typer.Option(
            "--kinds-alone/--no-kinds-alone",
            help="closed-loop: also train each device kind alone, and all together.",
        ),
    ] = True,
    short: Annotated[
        bool,
        typer.Option("--short", help="closed-loop: a minute and a half: six plans, few steps."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="closed-loop: folder of all that is measured; an interrupted loop goes on from "
            "there (closed-loop-out)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast and how right hetplan's own parts are.

    With --json errors are fractions and times seconds.
    """
    from hetplan.cli.bench_closed_loop import LoopOptions, bench_closed_loop
    from hetplan.errors import InputError

    if what not in BENCHMARKS:
        raise InputError(f"there is no benchmark {what!a}; there is {', '.join(BENCHMARKS)}")
    for folder in (reference, fit, judge):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{folder} is no folder")
    if reference is None and USUAL_REFERENCE.is_dir():
        reference = USUAL_REFERENCE
    if what not in ("search", "hethub") and (targets or time_limit):
        raise InputError("--targets and --time-limit belong to bench search and bench hethub")
    if what not in ("cost", "search") and cases is not None:
        raise InputError("--cases belongs to bench cost and bench search")
    if what != "search" and sizes is not None:
        raise InputError("--sizes belongs to bench search")
    loop = LoopOptions(
        plans=plans, seed=seed, jitter=jitter, hethub=kinds_alone, short=short, out=out
    )
    if what != "closed-loop" and loop.any:
        raise InputError(
            "--plans, --seed, --jitter, --kinds-alone, --short and --out belong to bench "
            "closed-loop"
        )
    if what == "closed-loop":
        code = bench_closed_loop(loop, plot=plot, as_json=as_json, schema=BENCH_SCHEMA)
        if code:
            raise typer.Exit(code)
    elif what == "cost":
        _cost(reference, _count(cases), as_json=as_json)
    elif what == "search":
        from hetplan.cli.bench_search import bench_search

        bench_search(
            reference,
            None if cases is None else Path(cases),
            sizes=sizes,
            targets=targets,
            time_limit=time_limit,
            plot=plot,
            as_json=as_json,
            schema=BENCH_SCHEMA,
        )
    elif what == "hethub":
        from hetplan.cli.bench_hethub import bench_hethub

        bench_hethub(targets=targets, time_limit=time_limit, as_json=as_json, schema=BENCH_SCHEMA)
    else:
        _accuracy(fit or reference, judge, plot, readings=readings, as_json=as_json)


def _count(cases: str | None) -> int:
    from hetplan.errors import InputError

    if cases is None:
        return 1000
    if not cases.isascii() or not cases.isdigit() or int(cases) < 1:
        raise InputError(f"--cases is {cases!a}; bench cost takes a number of at least 1")
    return int(cases)


def _cost(reference: Path | None, cases: int, *, as_json: bool) -> None:
    from hetplan.benchmarks.cost import cost_bench
    from hetplan.cli.bench_tables import cost_tables
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_table

    found = cost_bench(reference, cases=cases)
    if as_json:
        emit(encode(found, schema=BENCH_SCHEMA))
        return
    for table in cost_tables(found):
        print_table(table)
    for line in found.missing:
        say(f"left out: {line}")


def _accuracy(
    fit: Path | None, judge: Path | None, plot: Path | None, *, readings: bool, as_json: bool
) -> None:
    from hetplan.benchmarks.accuracy.accuracy import accuracy
    from hetplan.cli.bench_accuracy_tables import accuracy_lines, accuracy_tables
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_table

    found = accuracy(fit, judge or fit, readings=readings)
    if plot is not None:
        from hetplan.benchmarks.accuracy.plot import draw

        draw(found, plot)
    if as_json:
        emit(encode(found, schema=BENCH_SCHEMA))
        return
    for table in accuracy_tables(found):
        print_table(table)
    for line in accuracy_lines(found):
        say(line)
