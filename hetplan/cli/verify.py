"""`hetplan verify`: check a plan file again, its proof included, without the search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    Verbose,
    emit,
    emit_lines,
    moment_of,
    read_predictor,
)
from hetplan.errors import InputError
from hetplan.units import format_brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hetplan.proof.verify import ShownBound, Unshown, Verification


def verify(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="Plan file that `hetplan plan` wrote.")
    ],
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Check the closed form of N families only, drawn at random; default: of all.",
        ),
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            min=0.0,
            help="Exit with 2 where the shown gap is wider.",
        ),
    ] = None,
    time_limit: Annotated[
        str, typer.Option(metavar="TIME", help="What it does not look at in this time it names.")
    ] = "10 min",
    predictor: PredictorFile = None,
    store: Stores = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Check a plan file again without the search: rules, memory, price, and its lower bound.

    Exits with 2 and names the first statement that does not hold. Of the bound as much is shown as
    can be without the search.
    """
    from hetplan.deadline import ends_by
    from hetplan.files.encoding import encode
    from hetplan.proof.verify import VERIFICATION_SCHEMA
    from hetplan.proof.verify import verify as verified
    from hetplan.reports.terminal import ProgressLine

    predict, digest = read_predictor(predictor, store)
    with ProgressLine("checking families") as line, ends_by(moment_of(time_limit)):
        found = verified(
            plan,
            predict,
            digest,
            sample=sample,
            progress=lambda done, count: line.show(done, count, None, ""),
        )
    if as_json:
        emit(encode(found, schema=VERIFICATION_SCHEMA))
    else:
        emit_lines(lines(found, verbose=verbose))
    if gap is not None:
        shown = shown_gap(found)
        if not shown <= gap:
            raise InputError(f"a gap of {shown:.2%} is shown, more than {gap:.2%}")


MAX_LESS_SHOWN = 5
"""Lines of families that are shown in part, least first; --json has all."""


def shown_gap(found: Verification) -> float:
    """(step - shown bound) / step; 1 where nothing is shown of the bound."""
    return 1.0 if found.bound is None else 1.0 - found.bound.shown_seconds / found.step_seconds


def lines(found: Verification, *, verbose: bool = False) -> Iterator[str]:
    """What held, and how much of the bound can be shown; verbose: by which families."""
    seal = "sealed" if found.sealed else "of an older form, without a seal"
    memory, step = format_bytes(found.peak_memory_bytes), format_brief(found.step_seconds)
    yield f"{seal}, legal, {memory} on the fullest device, {step} a step: all as the file says"
    bound = found.bound
    if bound is not None:
        shown = format_seconds(bound.shown_seconds)
        whole = "all that the certificate claims"
        if bound.unshown:
            claimed = 1 - bound.claimed_seconds / found.step_seconds
            plans = f"{len(bound.unshown)} part{'s' * (len(bound.unshown) > 1)} of the plans"
            whole = f"the certificate claims {claimed:.2%}, of {plans} less can be shown"
        yield f"lower bound {shown}, gap {shown_gap(found):.2%}: {whole}"
        if verbose:
            yield from _families(bound)
    for words in found.not_checked:
        yield f"not checked: {words}"


def _families(bound: ShownBound) -> Iterator[str]:
    """How each family was excluded, and the parts of which less can be shown."""
    less = sum(each.family is not None for each in bound.unshown)
    yield (
        f"{bound.looked_at:,} of {bound.families:,} families: {bound.without_room:,} without room, "
        f"{bound.by_closed_form:,} excluded by the closed form, {bound.by_orders:,} by the program "
        f"over orders, {less:,} in part"
    )
    yield from map(_less_shown, bound.unshown[:MAX_LESS_SHOWN])
    if len(bound.unshown) > MAX_LESS_SHOWN:
        more = len(bound.unshown) - MAX_LESS_SHOWN
        yield f"and {more} more, of which more is shown (--json has them)"


def _less_shown(each: Unshown) -> str:
    seconds = format_seconds(each.shown_seconds)
    plans = each.plans if each.family is None else f"family {each.family} ({each.plans})"
    more = f"; the search has more by: {each.grounds}" if each.grounds else ""
    return f"in part: {seconds} of {plans}{more}"
