"""Energy and cost of a plan in words."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cost.energy.energy import Energy, energy_of, usd_per_step
from hetplan.cost.energy.power import power_law
from hetplan.plans.pieces import used_devices
from hetplan.search.result import SearchResult
from hetplan.units import digits, format_count, format_power


def energy_line(result: SearchResult) -> str:
    """`energy 0.81 kWh a step (90 %: 0.62 to 1.06), 412 kW at PUE 1.2; cost 3.10 USD a step`."""
    inputs, plan, estimate = result.inputs, result.plan, result.estimate
    energy = energy_of(plan, estimate, inputs.cluster)
    dollars = usd_per_step(plan, estimate, inputs.model, inputs.cluster, inputs.job)
    words = [_unknown(result) if energy is None else _energy(energy)]
    if dollars is not None:
        words.append(f"cost {digits(dollars)} USD a step")
    tokens = inputs.job.total_tokens
    whole = []
    if tokens is not None:
        steps = tokens / (estimate.tokens_per_second * estimate.step_seconds)
        whole += [] if energy is None else [kwh_words(steps * energy.kwh_per_step)]
        whole += [] if dollars is None else [f"{digits(steps * dollars)} USD"]
    if whole:
        words.append(f"{' and '.join(whole)} for {format_count(tokens or 0)} tokens")
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
    least, *_, most = sorted(each.pue for each in (*energy.islands, *energy.islands))
    return f"PUE {least:g}" + (f" to {most:g}" if most > least else "")


def watts_words(watts: float) -> str:
    """Three digits, as in `412 kW`."""
    return format_power(float(f"{watts:.3g}"))


def kwh_words(kwh: float) -> str:
    """Three digits, as in `0.81 kWh`, `1.06 GWh`."""
    for unit, size in (("GWh", 1e6), ("MWh", 1e3)):
        if kwh >= size:
            return f"{digits(kwh / size)} {unit}"
    return f"{digits(kwh)} kWh"


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
