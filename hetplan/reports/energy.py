"""Energy and cost of a plan in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from hetplan.cluster.power import power_law
from hetplan.cost.energy.clocks import StageClock, stage_clocks
from hetplan.cost.energy.energy import Energy, energy_of, usd_per_step, whole_run
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.pieces import used_devices
from hetplan.predict.predictor import Predictor
from hetplan.reports.terminal import new_table
from hetplan.search.result import Alternative, SearchResult
from hetplan.units import digits, format_brief, format_count, scaled


def energy_line(result: SearchResult) -> str:
    """`energy 0.81 kWh a step (90 %: 0.62 to 1.06), 412 kW at PUE 1.2; cost 3.10 USD a step`."""
    inputs, plan, estimate = result.inputs, result.plan, result.estimate
    energy = energy_of(plan, estimate, inputs.cluster)
    dollars = usd_per_step(plan, estimate, inputs.model, inputs.cluster, inputs.job)
    words = [_unknown(result) if energy is None else _energy(energy)]
    if dollars is not None:
        words.append(f"cost {digits(dollars)} USD a step")
    run = whole_run(plan, estimate, inputs.model, inputs.cluster, inputs.job)
    whole = [] if run is None or run.kwh is None else [kwh_words(run.kwh)]
    whole += [] if run is None or run.usd is None else [f"{digits(run.usd)} USD"]
    if whole:
        tokens = format_count(inputs.job.total_tokens or 0)
        words.append(f"{' and '.join(whole)} for {tokens} tokens with lost time")
    return "; ".join(words)


def _energy(energy: Energy) -> str:
    low, high = energy.kwh_range
    return (
        f"energy {kwh_words(energy.kwh_per_step)} a step (90 %: {digits(low)} to {digits(high)}), "
        f"{watts_words(energy.mean_watts)} at {_pues(energy)}"
    )


def _unknown(result: SearchResult) -> str:
    cluster = result.inputs.cluster
    names = [
        island.name
        for island, mine in used_devices(result.plan, cluster)
        if mine.any() and power_law(cluster, island) is None
    ]
    return f"energy unknown: give `power` of {', '.join(names)} in the cluster file"


def _pues(energy: Energy) -> str:
    least, *_, most = sorted(each.law.pue for each in (*energy.islands, *energy.islands))
    return f"PUE {least:g}" + (f" to {most:g}" if most > least else "")


def watts_words(watts: float) -> str:
    """Three digits, as in `412 kW`."""
    return scaled(watts, (" GW", 1e9), (" MW", 1e6), (" kW", 1e3), (" W", 1.0))


def kwh_words(kwh: float) -> str:
    """Three digits, as in `0.81 kWh`, `1.06 GWh`."""
    return scaled(kwh, (" GWh", 1e6), (" MWh", 1e3), (" kWh", 1.0))


def power_lines(result: SearchResult) -> Iterator[str]:
    """One line for each island in use: where its watts go, and what they rest on."""
    energy = energy_of(result.plan, result.estimate, result.inputs.cluster)
    for part in () if energy is None else energy.islands:
        place = f"{part.island} ({part.site})" if part.site else part.island
        yield (
            f"power of {place}: {watts_words(part.mean_watts)}, {part.devices:,} devices in "
            f"{part.nodes:,} nodes, in passes {part.computing_share:.0%} of the step at "
            f"{watts_words(part.law.computing_watts)} each, else "
            f"{watts_words(part.law.communicating_watts)}; {part.law.source}"
        )


_LEAST_SAVED = 0.001
"""Part of a step's energy below which lower clocks are not worth a line."""
_MOST_NAMED = 8
"""Runs of alike stages that a line names."""


def clock_lines(result: SearchResult, predictor: Predictor) -> Iterator[str]:
    """The clocks at which stages that wait lose no time, in one line; none where little is saved.

    By the predictor of the plan.
    """
    inputs = result.inputs
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    clocks = stage_clocks(pricer, result.plan)
    energy = energy_of(result.plan, result.estimate, inputs.cluster)
    part = saved_part(clocks, energy)
    if part is None or part < _LEAST_SAVED:
        return
    runs = [*_clock_runs(clocks, len(result.plan.pipelines) > 1)]
    more = f" and {len(runs) - _MOST_NAMED} more" * (len(runs) > _MOST_NAMED)
    yield (
        f"lower clocks that lose no time, means of passes: {', '.join(runs[:_MOST_NAMED])}{more}; "
        f"they would save {part:.1%} of the energy (a model: no clock was measured)"
    )


def saved_part(clocks: Sequence[StageClock], energy: Energy | None) -> float | None:
    """Of a step's energy, by all clocks together; None: not known."""
    saved = [each.kwh_saved for each in clocks if each.kwh_saved is not None]
    if energy is None or len(saved) < len(clocks):
        return None
    return math.fsum(saved) / energy.kwh_per_step


def _clock_runs(clocks: Sequence[StageClock], several: bool) -> Iterator[str]:
    """`stages 0-2 at 85 %`, for neighbours with one clock below the full one."""
    for (p, clock), run in groupby(clocks, key=lambda c: (c.pipeline, f"{c.mean_clock:.0%}")):
        first, *_, last = [each.stage for each in run for _ in (0, 1)]
        if clock != "100%":
            place = f"{first}" if first == last else f"{first}-{last}"
            where = f"pipeline {p}, " if several else ""
            yield f"{where}stage{'s' * (last > first)} {place} at {clock}"


FRONT_PROOF = (
    "proven: no plan of a point's own question (first column) has a step shorter by more than its "
    "gap, and no plan of any of them costs, or draws at these clocks, less by more than that; a "
    "plan between two points may be missing"
)


def front_table(result: SearchResult) -> Table:
    """One row per point, gaps in brackets."""
    table = new_table(
        "front | >step | >USD a step | >kWh a step | >devices",
        title="None is beaten in step, cost, energy and devices; in brackets its gap",
    )
    for point in result.alternatives:
        table.add_row(*map(escape, front_cells(point)))
    return table


def front_cells(point: Alternative) -> tuple[str, ...]:
    """What it is best at, its step, cost and energy, and its devices."""
    return (
        point.why,
        _with_gap(format_brief(point.step_seconds), point.gap),
        _with_gap(_or_none(point.usd_per_step), point.usd_gap),
        _with_gap(_or_none(point.kwh_per_step), point.kwh_gap),
        f"{point.devices:,}",
    )


def _or_none(number: float | None) -> str:
    return "-" if number is None else digits(number)


def _with_gap(words: str, gap: float | None) -> str:
    return words if gap is None else f"{words} ({gap:.1%})"
