"""`hetplan emit`: a plan as the files of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import say

TOOLS = ("sailor",)


def emit(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    target: Annotated[
        str, typer.Option("--target", help=f"Tool to write for: {', '.join(TOOLS)}.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there already.")
    ] = False,
) -> None:
    """Write a plan for another tool; what that cannot express is refused with the reason.

    sailor: the JSON of Sailor's simulator (eth-easl/sailor, simulations/validation).
    """
    from hetplan.cli.import_file import check_new
    from hetplan.emitters.sailor import sailor_text
    from hetplan.errors import Fault, InputError
    from hetplan.files.writing import write_atomically
    from hetplan.search.files import load_legal_plan

    if target not in TOOLS:
        raise InputError(f"--target {target!a}: nothing is written for that; {', '.join(TOOLS)} is")
    check_new(out, force=force)
    result = load_legal_plan(plan)
    try:
        text = sailor_text(result.plan, result.inputs.cluster, result.inputs.job)
    except InputError as error:
        raise InputError(
            *(
                Fault(file=str(plan), field=f"plan.{each.field}", message=each.message)
                for each in error.faults
            )
        ) from None
    write_atomically(out, text)
    say(f"wrote {out}")
