"""`hetplan verify`: check a plan file again, its proof included, without the search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, PredictorFile, Stores, emit, read_predictor

if TYPE_CHECKING:
    from hetplan.proof.verify import Verification


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
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Check a plan file again: rules, memory, price, and that no plan is faster than its bound.

    Exits with 2 and names the first statement that does not hold. The search is not asked.
    """
    from hetplan.cli.progress import ProgressLine
    from hetplan.files.encoding import encode
    from hetplan.proof.verify import VERIFICATION_SCHEMA
    from hetplan.proof.verify import verify as verified

    predict, digest = read_predictor(predictor, store)
    with ProgressLine("checking families") as line:
        found = verified(
            plan,
            predict,
            digest,
            sample=sample,
            progress=lambda done, count: line.show(done, count, None, ""),
        )
    if as_json:
        emit(encode(found, schema=VERIFICATION_SCHEMA))
        return
    for text in lines(found):
        emit(text)


def lines(found: Verification) -> list[str]:
    """What held, a line each, and what could not be checked."""
    sealed = "as hetplan wrote it" if found.sealed else "of an older form, without a seal"
    shown = [
        f"file         {sealed}",
        f"plan         legal; {found.peak_memory_bytes / 2**30:.1f} GiB on the fullest device",
        f"price        {found.step_seconds:.6g} s, replayed in Python; estimate made again",
    ]
    bound = found.bound
    if bound is not None:
        claimed, least = bound.claimed_seconds, bound.shown_seconds
        shown += [
            f"families     {bound.families:,}: {bound.without_room:,} without room, "
            f"{bound.by_closed_form:,} excluded by the closed form, "
            f"{bound.by_orders:,} by the program over orders",
            f"bound        {least:.6g} s shown, {claimed:.6g} s claimed",
            f"gap          {1 - least / found.step_seconds:.2%} shown, "
            f"{1 - claimed / found.step_seconds:.2%} claimed",
        ]
        shown += [
            f"less shown   {each.shown_seconds:.6g} s of {each.plans} (the search: {each.grounds})"
            for each in bound.unshown
        ]
    return shown + [f"not checked  {words}" for words in found.not_checked]
