"""`hetplan demo`: the whole loop on this machine, then a plan for 768 accelerators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import emit


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder in which the demo makes one of its own for what it does.")
    ] = Path("demo-out"),
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each plan.")] = 20,
) -> None:
    """Profile this machine, fit, plan, train, compare; then plan for 768 accelerators."""
    import time
    from datetime import datetime

    from hetplan.launchers import local_loop
    from hetplan.reports.comparison import loop_headline, loop_table

    started = time.monotonic()

    def heading(text: str) -> None:
        emit(f"\n=== {text} ({time.monotonic() - started:.0f} s) ===")

    # A folder of its own: an earlier demo's profile is of another moment and is not mixed in.
    folder = out / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    files = local_loop.LoopFiles(folder=folder)
    heading("1. Profile this CPU")
    local_loop.profile_this_cpu(files, emit)
    heading("2. Make a fast and a slow device kind of its cores, and profile them and their link")
    local_loop.make_kinds(files, emit)
    local_loop.profile_links(files, emit)
    heading("3. Fit the measurements, plan, and price the even split for comparison")
    local_loop.fit_and_plan(files, emit)
    heading(f"4. Train {steps} steps of the plan and of the even split")
    uneven, even = local_loop.train(files, steps, emit)
    heading("5. Measured against predicted")
    emit(loop_table((("hetplan's plan", uneven), ("even split", even))))
    emit(loop_headline(uneven, even))
    heading("6. Llama-140B on 128 + 640 accelerators of two kinds (datasheet figures)")
    local_loop.plan_at_scale(files, emit)
    emit(f"\nEverything is in {folder}; the demo took {time.monotonic() - started:.0f} s.")
