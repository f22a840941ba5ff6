"""`hetplan launch --check-numerics`: do the plan's device kinds compute the same?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.launchers.numerics_values import KindNumerics, Numerics
    from hetplan.search.result import SearchResult


MAX_LINES = 24
"""Lines of formats that are printed; a plan of many stages has as many boundaries."""


def check_numerics(
    plan: Path,
    *,
    pace: Path | None,
    tokens: int | None,
    out: Path | None,
    others: Sequence[Path],
    as_json: bool,
) -> None:
    """Compare the kinds; a LaunchError where they must not be mixed, or where one has no answer
    and none is being collected.
    """
    from hetplan.errors import InputError, LaunchError
    from hetplan.files.encoding import encode
    from hetplan.files.writing import check_writable
    from hetplan.launchers.numerics_formats import format_faults
    from hetplan.launchers.numerics_kinds import kinds_of_plan
    from hetplan.launchers.numerics_values import SCHEMA, save_numerics
    from hetplan.launchers.numerics_verdict import kinds_left, numerics_faults, units_left
    from hetplan.launchers.numerics_work import work_of
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(plan)
    if out is not None:
        check_writable(out)
    numerics, everyone = _answers(result, pace, tokens, others)
    if out is not None and not numerics.kinds:
        raise InputError(
            f"--numerics-out {out}: this machine has no kind of the plan that the files given by "
            "--numerics-with lack; leave it out"
        )
    if out is not None:
        save_numerics(numerics, out)
    if as_json:
        emit(encode(everyone, schema=SCHEMA).rstrip("\n"))
    else:
        _show(result, everyone)
    faults = (
        *format_faults(result, everyone),
        *units_left(everyone, work_of(result, everyone.setup)),
        *numerics_faults(everyone),
    )
    if faults:
        lines = "\n".join(faults)
        raise LaunchError(f"these kinds must not be mixed:\n{lines}")
    left = kinds_left(everyone, kinds_of_plan(result))
    if left:
        line = (
            f"no answer of {', '.join(left)}: run this with --numerics-out FILE where they are, "
            "then here with --numerics-with FILE"
        )
        if out is None:
            raise LaunchError(line)
        say(line)
    elif not as_json:
        kinds = " and ".join(each.kind for each in everyone.kinds)
        emit(f"{kinds}: every result is as exact as its number format allows")


def _answers(
    result: SearchResult, pace: Path | None, tokens: int | None, others: Sequence[Path]
) -> tuple[Numerics, Numerics]:
    """This machine's answers, and with them those of the files."""
    from hetplan.errors import InputError
    from hetplan.launchers.numerics import check_memory, compute_numerics, numerics_setup
    from hetplan.launchers.numerics_kinds import kinds_here, kinds_of_plan
    from hetplan.launchers.numerics_values import joined, load_numerics
    from hetplan.profiling.pacing import load_pace

    if tokens is not None and tokens < 1:
        raise InputError(f"--numerics-tokens {tokens}: it must be at least 1")
    setup = numerics_setup(result, tokens)
    read = tuple((path, load_numerics(path, setup)) for path in others)
    answered = {kind.kind for _, each in read for kind in each.kinds}
    paced = () if pace is None else tuple(each.device for each in load_pace(pace).kinds)
    kinds = kinds_of_plan(result)
    here = kinds_here([kind for kind in kinds if kind not in answered], paced)
    if not here and not read:
        raise InputError(
            f"this machine has none of the plan's device kinds ({', '.join(kinds)}); run this "
            "where one of them is"
        )
    if here:
        check_memory(result, setup)
    own = compute_numerics(result, setup, here, on_unit=say)
    return own, joined(own, read)


def _show(result: SearchResult, numerics: Numerics) -> None:
    from hetplan.job.trainer import trainer_settings
    from hetplan.launchers.numerics_formats import format_lines
    from hetplan.plans.formats import summed_formats
    from hetplan.reports.terminal import print_table

    setup, plan = numerics.setup, result.plan
    sent = {each.precision for line in plan.pipelines for each in line.boundaries}
    kept = trainer_settings(result.inputs.job).gradient_precision.value
    summed = ", ".join(sorted(summed_formats(plan))) or kept
    gradients = f"and reduced in {kept}" if summed == kept else f"in {kept}, reduced in {summed}"
    degrees = ", ".join(str(tp) for tp in setup.tensor_parallel)
    emit(
        f"{setup.model}: {setup.microbatch_size} x {setup.sequence_length} tokens, tp {degrees}, "
        f"seed {setup.seed}"
    )
    emit(
        f"formats: layers {setup.precision.value}; stage boundaries "
        f"{', '.join(sorted(sent)) or 'none'}; gradients kept {gradients}"
    )
    lines = format_lines(result)
    for line in lines[:MAX_LINES]:
        emit(f"  {line}")
    if len(lines) > MAX_LINES:
        emit(f"  and {len(lines) - MAX_LINES} more, all in the plan file")
    for kind in numerics.kinds:
        print_table(_table(kind))


def _table(kind: KindNumerics) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from hetplan.launchers.numerics_verdict import by_operator

    table = Table(
        title=escape(
            f"{kind.kind}: {kind.device_name}, {kind.driver}, torch {kind.torch_version}; of each "
            "operator the result that uses most of what is allowed"
        ),
        title_justify="left",
    )
    for name in ("operator", "results", "worst"):
        table.add_column(name)
    for name in ("rms", "allowed", "largest", "allowed", "used"):
        table.add_column(name, justify="right")
    for each in by_operator(kind):
        worst = each.worst
        where = "" if worst.what == worst.operator or worst.what == "whole" else f"{worst.what}, "
        table.add_row(
            escape(each.operator.replace("_", " ")),
            str(each.results),
            escape(f"{where}{worst.tensor}"),
            f"{worst.rms_deviation:.1e}",
            f"{worst.allowed.rms:.1e}",
            f"{worst.largest_deviation:.1e}",
            f"{worst.allowed.largest:.1e}",
            f"{worst.share:.0%}" if worst.share <= 1.0 else f"{worst.share:.3g} times",
        )
    return table
