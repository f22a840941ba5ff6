"""`python -m evaluation NAME`: how fast, how right and how good hetplan's own parts are.

Not part of the product: what is here reads other people's measurements (`--reference`) and other
planners' files. With `--json` errors are fractions and times seconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.main import end_like_ctrl_c, guarded
from hetplan.cli.options import AsJson, positive_numbers, say
from hetplan.errors import InputError
from hetplan.kernels import compile_at_once

USUAL_REFERENCE = Path("../shared/reference")
"""Where the folder of other people's measurements lies beside a checkout, if it is there."""
USUAL_SILICON = Path("../shared/silicon")
"""Where operators and power at the wall lie beside a checkout, if they are there."""
USUAL_OUT = Path("closed-loop-out")
USUAL_FAULTS = Path("faults-out")
SEARCH_LIMIT_SECONDS = 180.0
INVALID_EXIT = 5
"""The machine was too busy: neither goals reached nor goals missed."""

Reference = Annotated[
    Path | None,
    typer.Option(
        help="Folder of other people's measurements. Default: "
        f"{USUAL_REFERENCE} where it is there; otherwise its tables are left out."
    ),
]
Targets = Annotated[
    str | None, typer.Option(help="Targets of the table, with commas. Default: all that train.")
]

app = typer.Typer(
    name="evaluation",
    help="Measure how fast, how right and how good hetplan's own parts are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def accuracy(
    reference: Reference = None,
    fit: Annotated[
        Path | None, typer.Option(help="Folder whose unit data are fitted. Default: --reference.")
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose runs and unit data are predicted and not fitted. Default: the "
            "fitted folder, whose unit data are then left out in turn."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted against published step times, layers, operators and collectives."""
    from evaluation.accuracy.run import accuracy as run

    fit = _folder(fit) or _reference(reference)
    run(fit, _folder(judge) or fit).show(as_json=as_json)


def search(
    reference: Reference = None,
    cases: Annotated[
        Path | None,
        typer.Option(help="File of peer cases. Default: peers/sailor_cases.json of --reference."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of devices of the scaling table, with commas; `none` leaves it out. "
            "Default: all."
        ),
    ] = None,
    targets: Targets = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Longest search of the scaling table (180 s).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plans beside those of other planners, and the search's speed by size."""
    from evaluation.output import Answer
    from evaluation.search.cases import USUAL_FILE, read_cases
    from evaluation.search.peers import compare, peer_answer
    from evaluation.search.scaling import (
        INSTANCES,
        TARGETS,
        instances_of,
        scaling,
        scaling_section,
    )

    instances = (
        INSTANCES
        if sizes is None
        else instances_of(() if sizes == "none" else positive_numbers("--sizes", sizes))
    )
    folder = _reference(reference)
    if folder is None:
        found = Answer(lines=("left out: peer cases: no reference folder; give --reference DIR",))
    else:
        found = peer_answer(compare(read_cases(cases or folder / USUAL_FILE), folder))
    rows = scaling(
        instances,
        _targets(targets) or TARGETS,
        time_limit_seconds=_seconds(time_limit) or SEARCH_LIMIT_SECONDS,
        progress=say,
    )
    replace(found, sections=(*found.sections, scaling_section(rows))).show(as_json=as_json)


def distil(
    silicon: Annotated[
        Path, typer.Option(help="Folder with operators/ of other people's measurements.")
    ],
    out: Annotated[Path, typer.Option(help="Store that is replaced.")] = Path("profiles/kinds"),
) -> None:
    """Other people's measurements of operators as the profiles that hetplan ships."""
    from evaluation.distil.kinds import distil as run

    run(silicon, out).show(as_json=False)


def cost(reference: Reference = None, as_json: AsJson = False) -> None:
    """The cost model's speed; its errors are in `accuracy` (`--reference` is not read)."""
    from evaluation.cost import cost_answer

    _folder(reference)
    cost_answer().show(as_json=as_json)


def hethub(
    targets: Targets = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Longest search of a plan. Default: the jobs' own limit.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One plan over two device kinds against the sum of its kinds alone, all predicted."""
    from evaluation.hethub import TARGETS, hethub_answer, hethub_rows, shipped_mixes

    rows = hethub_rows(
        shipped_mixes(),
        _targets(targets) or TARGETS,
        time_limit_seconds=_seconds(time_limit),
        progress=say,
    )
    hethub_answer(rows).show(as_json=as_json)


def closed_loop(
    plans: Annotated[int | None, typer.Option(help="Plans that are trained (20).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the choice of plans and the jitter (0).")
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(help="Of the second pass, a fraction; 0 leaves it out (0.05)."),
    ] = None,
    kinds_alone: Annotated[
        bool,
        typer.Option(
            "--kinds-alone/--no-kinds-alone",
            help="Also train each device kind alone, and all together.",
        ),
    ] = True,
    short: Annotated[
        bool, typer.Option("--short", help="A minute and a half: six plans, few steps.")
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of all that is measured; an interrupted loop goes on from there."
        ),
    ] = USUAL_OUT,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured steps into this SVG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profile, fit, plan, really train and compare, on hosts emulated on this machine."""
    from evaluation.closed_loop.loop import closed_loop as run
    from evaluation.closed_loop.results import check_drawable, draw, loop_answer
    from evaluation.closed_loop.values import LoopSpec, Verdict

    if plot is not None:
        check_drawable(plot)
    given = {"plans": plans, "seed": seed, "jitter": jitter}
    base = LoopSpec.of_short() if short else LoopSpec(hethub=kinds_alone)
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    found = run(replace(base, **changes), out, say=say)
    if plot is not None:
        draw(found, plot)
    loop_answer(found).show(as_json=as_json)
    verdicts = [each.verdict for each in found.passes]
    verdicts += [found.hethub.verdict] if found.hethub is not None else []
    if Verdict.INVALID in verdicts:
        raise typer.Exit(INVALID_EXIT)


def limits(
    questions: Annotated[int, typer.Option(min=1, help="Random questions that are asked.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the first of them.")] = 0,
    journal: Annotated[
        Path | None,
        typer.Option(help="File of answers; no question that is there is asked again."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """By how much `hetplan plan` overruns random time limits, and its largest memory."""
    from evaluation.limits import limits as run

    run(questions, seed, journal, say).show(as_json=as_json)


def worth(reference: Reference = None, as_json: AsJson = False) -> None:
    """What one device of a kind is worth in another's terms, and measured ratios."""
    from evaluation.worth import worth as run

    run(_reference(reference)).show(as_json=as_json)


def startup(reference: Reference = None, as_json: AsJson = False) -> None:
    """Start-up times of MLPerf's results by a law that did not see the system."""
    from evaluation.startup import startup_answer

    folder = _reference(reference)
    if folder is None:
        raise InputError("no folder of measurements; give --reference DIR")
    startup_answer(folder).show(as_json=as_json)


def robust(reference: Reference = None, as_json: AsJson = False) -> None:
    """Nominal and robust plans under bandwidths that were measured between regions."""
    from evaluation.robust import robust_answer

    folder = _reference(reference)
    if folder is None:
        raise InputError("no folder of measurements; give --reference DIR")
    robust_answer(folder).show(as_json=as_json)


def experts(
    targets: Targets = None,
    time_limit: Annotated[str | None, typer.Option(help="Longest search of a plan (12 s).")] = None,
    as_json: AsJson = False,
) -> None:
    """What attention on one device kind and experts on another could gain at most."""
    from evaluation.experts_apart import TARGETS, experts_answer, experts_rows

    found = experts_rows(_targets(targets) or TARGETS, _seconds(time_limit) or 12.0, say)
    experts_answer(list(found)).show(as_json=as_json)


def local_steps(as_json: AsJson = False) -> None:
    """Local steps against synchronous ones, trained on an emulated cluster (root)."""
    from evaluation.local_steps import local_steps_answer

    local_steps_answer().show(as_json=as_json)


def power(
    silicon: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder with power at the wall. Default: {USUAL_SILICON} where it is there."
        ),
    ] = None,
    reference: Reference = None,
    as_json: AsJson = False,
) -> None:
    """What devices draw at the wall by load, and the law's errors on systems left out."""
    from evaluation.power import power_answer

    measured = silicon or (USUAL_SILICON if USUAL_SILICON.is_dir() else None)
    times = _reference(reference)
    if measured is None or times is None:
        raise InputError("power at the wall needs both folders: give --silicon and --reference")
    power_answer(measured, times).show(as_json=as_json)


def soak(
    questions: Annotated[int, typer.Option(min=1, help="Questions that are planned.")] = 500,
    fresh: Annotated[
        int, typer.Option(min=0, help="Of them, how many in a process of their own too.")
    ] = 25,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Many random questions in one process: memory, equal answers, nothing left."""
    from evaluation.soak import soak as run
    from evaluation.soak import soak_answer

    found = run(questions, fresh, seed, say)
    soak_answer(found).show(as_json=as_json)
    if not found.is_clean:
        raise typer.Exit(1)


def faults(
    runs: Annotated[int, typer.Option(min=1, help="Runs with a fault; as many without.")] = 12,
    seed: Annotated[int, typer.Option(help="Of faults, culprits and strengths.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the runs; an interrupted evaluation goes on from there.")
    ] = USUAL_FAULTS,
    as_json: AsJson = False,
) -> None:
    """Planted faults on emulated hosts: who is named, and who is accused wrongly (root)."""
    from evaluation.faults import faults as run

    run(runs, seed, out, say).show(as_json=as_json)


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise InputError(f"{path} is no folder")
    return path


def _reference(path: Path | None) -> Path | None:
    if path is None and USUAL_REFERENCE.is_dir():
        return USUAL_REFERENCE
    return _folder(path)


def _targets(text: str | None) -> tuple[str, ...]:
    from hetplan.plans.targets import target

    return tuple(target(name.strip()).name for name in (text or "").split(",") if name.strip())


def _seconds(text: str | None) -> float | None:
    from hetplan.units import Dimension, parse_quantity

    try:
        return None if text is None else parse_quantity(text, Dimension.TIME)
    except InputError as error:
        raise InputError(f"--time-limit: {error}") from None


for _command in (
    accuracy, search, cost, power, hethub, experts, limits, worth, closed_loop, distil, soak,
    startup, robust, faults, local_steps,
):  # fmt: skip
    app.command(_command.__name__.replace("_", "-"))(guarded(_command))


def main() -> None:
    """Run the command that the arguments name; its tables of speed are of compiled kernels."""
    end_like_ctrl_c()
    compile_at_once()
    app()


if __name__ == "__main__":
    main()
