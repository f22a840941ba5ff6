"""`hetplan demo`: the whole loop on this machine, then a plan for 768 accelerators."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import emit, emit_lines


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's own.")] = Path("demo-out"),
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each plan.")] = 20,
) -> None:
    """Profile this machine, fit, plan, train, compare; then plan for 768 accelerators."""
    import time
    from datetime import datetime

    from hetplan.launchers import local_loop
    from hetplan.reports.comparison import loop_headline, loop_lines
    from hetplan.reports.terminal import ProgressLine

    started = time.monotonic()
    # A folder of its own: an earlier demo's profile is of another moment and is not mixed in.
    folder = out / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    files = local_loop.LoopFiles(folder=folder)
    emit_lines([f"Files, commands and all that they print: {folder}"])

    with ProgressLine("", shown=None) as line:

        def wait(words: str) -> None:
            line.show(0, 0, None, words)

        def heading(text: str) -> None:
            emit(f"\n{text} ({time.monotonic() - started:.0f} s)")

        heading("1. Profile this CPU")
        local_loop.profile_this_cpu(files, wait)
        emit_lines(local_loop.profile_lines(files))
        heading("2. Make a fast and a slow device kind of its cores, and profile them")
        local_loop.make_kinds(files, wait)
        local_loop.profile_links(files, wait)
        emit_lines(local_loop.kind_lines(files))
        heading("3. Fit the measurements, plan, and price the even split")
        local_loop.fit_and_plan(files, wait)
        emit_lines(local_loop.plan_lines(files))
        heading(f"4. Train {steps} steps of both, and compare")
        uneven, even = local_loop.train(files, steps, wait)
        emit_lines(loop_lines((("hetplan's plan", uneven), ("even split", even))))
        emit_lines([loop_headline(uneven, even)])
        heading("5. Plan Llama-140B for 128 + 640 accelerators of two kinds")
        plan = local_loop.plan_at_scale(files, wait)
        _show_answer(plan)
    emit(f"\nThe demo took {time.monotonic() - started:.0f} s. What to try next:")
    emit_lines(
        (
            f"  hetplan explain {shlex.quote(str(plan))}",
            f"  hetplan compare {shlex.quote(str(files.run_log))} "
            f"--plan {shlex.quote(str(files.uneven))}",
            "  your own cluster: docs/quickstart.md",
        )
    )


def _show_answer(plan: Path) -> None:
    """The lines above the table of a plan's summary."""
    from itertools import takewhile

    from hetplan.reports.summary import summarize
    from hetplan.reports.terminal import text_width
    from hetplan.search.files import load_legal_plan

    for line in takewhile(bool, summarize(load_legal_plan(plan)).lines(text_width() - 2)):
        emit(f"  {line}")
