"""What `hetplan explain traffic` prints: bytes per link and class, and switches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from hetplan.cost.network.segments import LinkScope, TrafficClass
from hetplan.cost.traffic import Ledger, all_classes, ledger
from hetplan.files.encoding import encode
from hetplan.predict.predictor import Predictor
from hetplan.reports.terminal import folded, print_small, small_table, text_width
from hetplan.search.result import SearchResult
from hetplan.units import format_rate, format_seconds

TRAFFIC_SCHEMA = "hetplan.traffic/1"
SWITCH_BITS_PER_SECOND = 51.2e12
"""One switch of 64 ports of 800 Gbit/s, one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching:
    """What the network of one island carries, evenly over a step."""

    island: str
    bytes_per_step: float
    """Between its nodes, to other islands and to storage; each byte once."""
    bits_per_second: float
    switches: int
    """Of 51.2 Tbit/s, at full load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """A plan's traffic with what follows from it."""

    model: str
    """`ring`, or `priced`: the algorithms that are cheapest by the predictor."""
    ledger: Ledger
    step_seconds: float
    """As estimated in the plan's file."""
    switching: tuple[Switching, ...]


def traffic_report(
    result: SearchResult, model: str, tokens: int | None, predictor: Predictor | None
) -> TrafficReport:
    """A plan's traffic by `ring` or `priced` (with a predictor)."""
    inputs, step = result.inputs, result.estimate.step_seconds
    counted = ledger(
        result.plan, inputs.model, inputs.cluster, inputs.job, predictor, total_tokens=tokens
    )
    names = tuple(island.name for island in inputs.cluster.islands)
    return TrafficReport(
        model=model,
        ledger=counted,
        step_seconds=step,
        switching=switching_of(counted, names, step),
    )


def print_traffic(report: TrafficReport, *, as_json: bool) -> None:
    """The ledger and the switches."""
    if as_json:
        print(encode(report, schema=TRAFFIC_SCHEMA), end="", flush=True)
        return
    print("bytes per step, all devices, counted where sent", flush=True)
    print_small(ledger_table(report))
    for line in folded(ledger_lines(report), text_width()):
        print(line, flush=True)


def switching_of(
    ledger: Ledger, islands: tuple[str, ...], step_seconds: float
) -> tuple[Switching, ...]:
    """What each island's switches must carry."""
    switching = []
    for island in islands:
        size = ledger.switched(island)
        bits = 8.0 * size / step_seconds
        switching.append(
            Switching(
                island=island,
                bytes_per_step=size,
                bits_per_second=bits,
                switches=math.ceil(bits / SWITCH_BITS_PER_SECOND),
            )
        )
    return tuple(switching)


def ledger_table(report: TrafficReport) -> Table:
    """One row per link, one column per class that carries anything."""
    ledger = report.ledger
    classes = tuple(all_classes(ledger))
    columns = ["link", *(f">{traffic.value}" for traffic in classes), ">all"]
    table = small_table(" | ".join(columns))
    for link in ledger.links:
        own = {
            entry.traffic: entry.bytes_per_step for entry in ledger.entries if entry.link == link
        }
        cells = [_bytes(own[traffic]) if traffic in own else "" for traffic in classes]
        table.add_row(escape(str(link)), *cells, _bytes(ledger.over(link)))
    totals = [_bytes(ledger.of_class(traffic)) for traffic in classes]
    table.add_row("all links", *totals, _bytes(ledger.bytes_per_step))
    return table


def ledger_lines(report: TrafficReport) -> Iterator[str]:
    """The run as a whole, switches, and storage."""
    ledger = report.ledger
    tokens, steps = ledger.total_tokens, ledger.steps
    if tokens is not None and steps is not None:
        per_class = ", ".join(
            f"{traffic.value} {_bytes(ledger.of_class(traffic) * steps)}"
            for traffic in all_classes(ledger)
        )
        yield (
            f"{tokens:,} tokens, {steps:,.0f} steps: {_bytes(ledger.bytes_per_step * steps)} "
            f"({per_class})"
        )
    else:
        yield "the whole run is not counted: give --tokens, or total_tokens in the job"
    yield (
        f"switches, mean over the step of {format_seconds(report.step_seconds)} (peaks are "
        f"higher), of {format_rate(SWITCH_BITS_PER_SECOND, 'bit/s')} each:"
    )
    for island in report.switching:
        if island.bytes_per_step:
            yield (
                f"  {island.island}: {_bytes(island.bytes_per_step)} per step, "
                f"{format_rate(island.bits_per_second, 'bit/s')}, {island.switches} "
                f"{'switch' if island.switches == 1 else 'switches'}"
            )
    stored = sum(
        entry.bytes_per_step for entry in ledger.entries if entry.link.scope is LinkScope.STORAGE
    )
    if TrafficClass.CHECKPOINT not in all_classes(ledger):
        yield (
            f"storage: {_bytes(stored)} per step; no checkpoints are counted "
            "(checkpoint_interval_steps of the job)"
        )
    else:
        yield f"storage: {_bytes(stored)} per step"


def _bytes(size: float) -> str:
    """In powers of 1000, as networks count, up to exabytes."""
    return f"{size / 1e18:,.4g} EB" if size >= 1e18 else format_rate(size, "B")
