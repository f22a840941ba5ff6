"""`hetplan bench closed-loop`: predicted against really trained, on hosts emulated here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.benchmarks.closed_loop.values import (
        ClosedLoop,
        HethubMeasured,
        LoopPass,
        TrainedPlan,
    )

USUAL_OUT = Path("closed-loop-out")
INVALID_EXIT = 5
"""The machine was too busy: neither goals reached nor goals missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What the command line says; None: as usual."""

    plans: int | None = None
    seed: int | None = None
    jitter: float | None = None
    hethub: bool = True
    short: bool = False
    out: Path | None = None

    @property
    def any(self) -> bool:
        """Whether something of it is given."""
        return self != LoopOptions()


def bench_closed_loop(
    options: LoopOptions, *, plot: Path | None, as_json: bool, schema: str
) -> int:
    """Run the loop, print and draw it; the exit code."""
    from dataclasses import replace

    from hetplan.benchmarks.closed_loop.loop import closed_loop
    from hetplan.benchmarks.closed_loop.plot import draw
    from hetplan.benchmarks.closed_loop.values import LoopSpec, Verdict
    from hetplan.benchmarks.drawing import check_drawable
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_table

    if plot is not None:
        check_drawable(plot)
    given = {
        name: value
        for name in ("plans", "seed", "jitter")
        if (value := getattr(options, name)) is not None
    }
    base = LoopSpec.of_short() if options.short else LoopSpec(hethub=options.hethub)
    spec = replace(base, **given)
    found = closed_loop(spec, options.out or USUAL_OUT, say=say)
    if plot is not None:
        draw(found, plot)
    if as_json:
        emit(encode(found, schema=schema))
    else:
        for table in loop_tables(found):
            print_table(table)
        for line in loop_lines(found):
            emit(line)
    verdicts = [each.verdict for each in found.passes]
    verdicts += [found.hethub.verdict] if found.hethub is not None else []
    return INVALID_EXIT if Verdict.INVALID in verdicts else 0


def loop_tables(found: ClosedLoop) -> Iterator[Table]:
    """The plans of every pass, the totals, and HETHUB's figure."""
    for each in found.passes:
        yield _pass_table(each)
    yield _totals_table(found)
    if found.hethub is not None:
        yield _hethub_table(found.hethub)


def _title(each: LoopPass) -> str:
    return f"{each.jitter:.0%} jitter" if each.jitter else "no jitter"


def _pass_table(found: LoopPass) -> Table:
    from hetplan.cli.bench_tables import table_of

    return table_of(
        f"Predicted and trained, {_title(found)}",
        ("plan", "form"),
        (
            "predicted", "measured", "error", "stalled", "steps differ by", "overrun",
            "counted", "ledger", "carried",
        ),
        (
            (
                row.name + (" *" if row.searched else ""), row.form, *_times(row.trained),
                f"{row.stalled:.0%}", f"{row.trained.spread:.1%}", f"{row.trained.overrun:.0%}",
                *_bytes(row.trained),
            )
            for row in found.rows
        ),
    )  # fmt: skip


def _times(trained: TrainedPlan) -> tuple[str, str, str]:
    return (
        f"{trained.predicted_seconds:.3f} s",
        f"{trained.measured_seconds:.3f} s",
        f"{trained.error:+.1%}",
    )


def _bytes(trained: TrainedPlan) -> tuple[str, str, str]:
    return (
        f"{trained.counted_long_bytes / 1e6:.2f} MB",
        f"{trained.ledger_long_bytes / 1e6:.2f} MB",
        f"{trained.carried_long_bytes / trained.all_steps / 1e6:.2f} MB",
    )


def _totals_table(found: ClosedLoop) -> Table:
    from hetplan.cli.bench_tables import table_of

    return table_of(
        "All plans of a pass",
        ("pass",),
        (
            "plans", "MAPE", "worst", "mean error", "Spearman", "regret", "repeats differ by",
            "overrun", "longest / shortest", "stalled >= 25 %", "load", "steal",
        ),
        (
            (
                _title(each), len(each.rows), f"{each.totals.mape:.2%}",
                f"{each.totals.worst:.1%}", f"{each.totals.bias:+.1%}",
                f"{each.totals.spearman:.3f}", f"{each.totals.regret:.2%}",
                f"{each.totals.repeats_spread:.1%}", f"{each.totals.overrun:.1%}",
                f"{each.totals.range:.2f}", each.totals.stalled_plans,
                f"{each.totals.load_average:.1f}", f"{each.totals.steal:.1%}",
            )
            for each in found.passes
        ),
        names_after=(),
    )  # fmt: skip


def _hethub_table(found: HethubMeasured) -> Table:
    from hetplan.cli.bench_tables import table_of

    return table_of(
        "Each kind alone, then all together; at most 64 microbatches per pipeline and step",
        ("devices", "plan"),
        (
            "samples", "predicted", "measured", "error", "tokens/s", "of the kinds alone",
            "of its own bound", "overrun",
        ),
        (
            (
                row.what, row.name, row.samples, *_times(row.trained),
                f"{row.tokens_per_second:,.0f}",
                "" if row.ratio is None else f"{row.ratio:.2%}",
                "" if row.bound_ratio is None else f"{row.bound_ratio:.2%}",
                f"{row.trained.overrun:.0%}",
            )
            for row in (*found.alone, *found.together)
        ),
    )  # fmt: skip


def loop_lines(found: ClosedLoop) -> Iterator[str]:
    """Verdicts, and what the columns are."""
    for each in found.passes:
        yield _verdict(_title(each), each.verdict, each.reasons)
    if found.hethub is not None:
        yield _verdict("all kinds together", found.hethub.verdict, found.hethub.reasons)
    yield (
        f"* the plan that `hetplan plan` found, trained {found.spec.repeats} times. Plans were "
        f"chosen by predicted rank, seed {found.spec.seed}, from {found.pool} legal ones, of which "
        f"{found.left_out_slow} were left out because they would take many times the best"
    )
    yield (
        f"measured: median of {found.spec.steps} steps after {found.spec.warmup_steps} of warm-up. "
        "stalled: predicted part of the step in bubble or exposed communication. overrun: paced "
        "passes that took longer than their pace"
    )
    yield (
        "counted, ledger, carried: over the link between the regions, both ways, in a step: as the "
        "trainer counts, as the cost model has it, and as the relay carried (headers, barriers and "
        "set-up too)"
    )
    yield found.machine
    if found.weight:
        yield f"the loop's processes had no more weight than others: {found.weight}"


def _verdict(what: str, verdict: str, reasons: tuple[str, ...]) -> str:
    return f"{what}: {verdict}" + (f" ({'; '.join(reasons)})" if reasons else "")
