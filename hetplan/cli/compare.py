"""`hetplan compare`: a run's log beside its plan, and what of the step is off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, PredictorFile, Stores, check_replaceable, emit, say

if TYPE_CHECKING:
    from hetplan.launchers.compare_values import Comparison
    from hetplan.search.result import SearchResult


def compare(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Log files of one run: of Megatron-LM, torchtitan, DeepSpeed or NeMo, one per "
            "rank or restart, gzip or not; or hetplan's own run log."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file that the run ran; it holds its inputs.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="YAML list of several runs, each with `log:` and `plan:`."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model file over the plan's; prices it again.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file over the plan's; prices it again.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="Job file over the plan's; prices it again.")
    ] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="megatron, nemo, torchtitan or deepspeed. Default: whose lines it has."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="First steps of every start that are left out. Default: 3; of hetplan's own run "
            "log what its launch left out."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Predictor to write: the fit, corrected by these runs, where that helps on runs "
            "(or steps) that were held back."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write --calibrate's file even where it did not help.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Set a training run's log against its plan and name the part of the step that is off.

    As in: hetplan compare train.log --plan plan.json
    """
    from hetplan.cli.compare_runs import asked_runs, compared, predictor_to_price_by
    from hetplan.errors import InputError

    if force and calibrate is None:
        raise InputError("--force belongs to --calibrate")
    if calibrate is not None:
        from hetplan.predict.laws import SCHEMA

        check_replaceable(calibrate, SCHEMA, "predictor")
    asked = asked_runs(logs, plan, runs)
    changes = (model, cluster, job)
    again = calibrate is not None or predictor is not None or bool(store) or any(changes)
    predict = predictor_to_price_by(predictor, store, calibrate) if again else None
    found = compared(asked, changes, predict, trainer=trainer, warmup_steps=warmup)
    if calibrate is not None and predict is not None:
        from hetplan.cli.compare_calibrate import calibrate_with

        calibrate_with(found, predict, calibrate, force=force, as_json=as_json)
        return
    show([each.comparison for each in found], as_json=as_json)


def show(comparisons: list[Comparison], *, as_json: bool) -> None:
    """One comparison, or one per run."""
    if as_json:
        emit(comparison_text(comparisons))
        return
    from hetplan.reports.compare import comparison_lines, part_table, run_table, timer_table
    from hetplan.reports.terminal import print_table

    for comparison in comparisons:
        if len(comparisons) > 1:
            emit(f"\n{', '.join(comparison.files)}")
        if comparison.timers:
            print_table(timer_table(comparison))
        if comparison.parts:
            print_table(part_table(comparison))
        for line in comparison_lines(comparison):
            emit(line)
    if len(comparisons) > 1:
        print_table(run_table(comparisons))


def comparison_text(comparisons: list[Comparison]) -> str:
    """JSON of one comparison, or of several under `runs`, derived figures included."""
    import json

    from hetplan.files.encoding import to_plain
    from hetplan.launchers.compare_values import SCHEMA

    def data(comparison: Comparison) -> dict[str, object]:
        plain = to_plain(comparison)
        if not isinstance(plain, dict):
            raise TypeError("a comparison is a mapping")
        return plain | {
            "relative_error": comparison.relative_error,
            "inside_interval": comparison.inside_interval,
        }

    rows = [data(each) for each in comparisons]
    whole = rows[0] if len(rows) == 1 else {"runs": rows}
    return json.dumps(
        whole | {"schema": SCHEMA}, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False
    )


def note_repricing(plan: Path, result: SearchResult, before: float) -> None:
    """Say on stderr how far the prediction is from the plan file's."""
    from hetplan.units import format_seconds

    after = result.estimate.step_seconds
    told = "as in the plan file"
    if format_seconds(after) != format_seconds(before):
        told = f"instead of the plan file's {format_seconds(before)}"
    say(f"{plan} priced again: {format_seconds(after)} {told}")
