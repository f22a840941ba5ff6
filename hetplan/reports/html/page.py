"""The report as one HTML file: `report_text`.

Every number of the page is a field of a result or of its prices (`values`); what a picture draws
also stands in the page as JSON, for the tooltips and for tests. The file loads nothing: styles,
script and pictures are inside. Names come from files and are escaped by the template.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hetplan.comparison.compare import Comparison
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import InputError
from hetplan.plans.pieces import used_devices
from hetplan.reports.explained import every_limit, idle_lines
from hetplan.reports.html import charts
from hetplan.reports.html.answer import (
    SPACE,
    Fact,
    bytes_words,
    change_words,
    decimal_bytes,
    energy_section,
    facts,
    gain_of,
    headline,
    idle_devices,
    seconds_words,
    share_words,
    ticks,
)
from hetplan.reports.html.values import LinkUse, PlanView, distinct
from hetplan.reports.plans import grouped, refused_lines, with_node_names
from hetplan.reports.summary import StageRow, emit_target
from hetplan.reports.timeline import PipelineTimeline, forward_passes
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.quoting import FOLDER, word
from hetplan.search.descriptions import layout_words
from hetplan.search.result import FamilyBound, Proof, SearchResult, ShadowPrice
from hetplan.trainers import TRAINERS, trainer_named
from hetplan.trainers.emission import emission_for
from hetplan.units import counted, format_each, format_rate, number_runs
from hetplan.version import __version__
from hetplan.whatif.smaller_questions import usable_islands

MAX_BARS = 40_000
"""Bars of all timelines of a page: 2 MB of pictures and data, which a browser draws in a second."""
MAX_PIPELINES = 12
"""Unlike pipelines of a plan that are drawn."""
MOST_APART = 240
"""Bars of a row with lines between them, which would hide more of them; `page.js` has it too."""
MOST_FAMILIES = 40
"""Of a search: the lowest bounds; the plan file has all."""
MEMORY_PARTS = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("temporary", "temporary_bytes"),
    ("buffers", "buffer_bytes"),
)
ENDED = {
    "optimal": "The search reached the gap of the job.",
    "limit": "A limit ended the search before the gap of the job.",
    "interrupted": "The search was interrupted.",
    "open": "The search ended by itself, without a proof of the job's gap for every plan.",
}
"""What a certificate's status means."""
SOURCES = {
    "measured": "your own samples of this device kind or link",
    "others' measured": "samples of this kind that others published and hetplan ships",
    "related": "laws of other kinds, carried over by datasheet figures",
    "datasheet": "the vendor's figures alone; nothing was measured",
}
"""What a prediction's source means."""


GROUNDS = {
    "order-free": "a formula that leaves out in which order islands come",
    "boundaries": "that formula with the transfers between islands",
    "program": "a program over all orders, stages and cuts",
    "every plan": "every plan below it was priced",
    "prices": "a price on every device, for plans of several pipelines",
    "journal": "what a search that was broken off has left",
}
"""What a bound's grounds mean (`hetplan.search.solver.Grounds`)."""


def report_text(views: Sequence[PlanView]) -> str:
    """The page of one plan, or of several side by side."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": seconds_words,
        "bytes": bytes_words,
        "share": share_words,
        "decimal_bytes": decimal_bytes,
        "change": change_words,
    }
    page = environment.get_template("page.html.j2")
    kinds = list(
        dict.fromkeys(
            island.device.kind for view in views for island in view.result.inputs.cluster.islands
        )
    )
    own = [_shown(view, kinds, MAX_BARS // len(views)) for view in views]
    text = page.render(
        plans=own,
        facts=_together([plan["facts"] for plan in own]),
        kinds=kinds,
        sources=SOURCES,
        grounds=GROUNDS,
        version=__version__,
        memory_parts=[name for name, _ in MEMORY_PARTS],
        styles=_file("page.css"),
        script=_file("page.js"),
    )
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""What shows nothing, or turns the text around it: a plan edited by hand may hold it."""


def _file(name: str) -> Markup:
    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))  # our own text


# ---- one plan


def _shown(view: PlanView, kinds: Sequence[str], most: int) -> dict[str, Any]:
    """What the template fills in for a plan."""
    result = view.result
    step = result.estimate.step_seconds
    own: dict[str, Any] = {
        "name": view.name,
        "file": shlex.quote(view.name),
        "title": f"{result.inputs.model.name} on {result.inputs.cluster.name}",
        "result": result,
        "estimate": result.estimate,
        "kinds": kinds,
        "headline": headline(result),
        "facts": [*facts(view)],
        "stages": [_stage(row, len(result.plan.pipelines) > 1) for row in view.rows],
        "anew": view.priced_seconds if view.is_priced_anew else None,
        "stragglers": view.straggler_seconds,
        "timelines": [*_timelines(view, kinds, most)],
        "undrawn": 0 if view.timeline.pipelines else forward_passes(result.plan),
        "memory": [*_memory(view.rows)],
        "components": [*_components(result.estimate)],
        "use": [*_use(result.estimate, kinds)],
        "map": _map(view, kinds),
        "links": [*_links(view.links, step)],
        "limits": [line.strip() for line in every_limit(view.limits)][1:],
        "most_limits": len(view.limits.islands),
        "idle": [*idle_lines(result.idle, result)],
        "left": [*idle_devices(result)],
        "prices": [*_prices(result.prices)],
        "asks": not result.prices and result.certificate is not None,
        "unused": [*_unused_links(view)],
        "start": _start(result),
        "search": _search(result),
        "alternatives": [] if result.is_front else [*_alternatives(result)],
        "energy": energy_section(view),
        "comparisons": [_comparison(each) for each in view.comparisons],
        "causes": [*_causes(view)],
        "notes": [*grouped(result.estimate.warnings)],
    }
    own["data"] = {
        "step_seconds": step,
        "timelines": [each["data"] for each in own["timelines"]],
        **{name: [row["data"] for row in own[name]] for name in _ROWS},
        "search": own["search"] and own["search"]["data"],
        "nodes": own["map"]["data"],
    }
    return own


def _shell_words(texts: Iterable[str]) -> str:
    """As a shell reads them; the emitted folder is DIR, as in the command beside."""
    return " ".join(word(text.replace(FOLDER, "DIR")) for text in texts)


_ROWS = ("memory", "components", "use", "links", "prices", "alternatives", "comparisons")
"""Charts that are tables, a row of data each."""


def _together(every: Sequence[Sequence[Fact]]) -> list[tuple[Fact, list[str]]]:
    """(the fact of the first plan that has it, its words of every plan)."""
    first = {fact.name: fact for each in reversed(every) for fact in reversed(each)}
    own = [{fact.name: fact.words for fact in each} for each in every]
    names = dict.fromkeys(fact.name for each in every for fact in each)
    return [(first[name], [each.get(name, "") for each in own]) for name in names]


def _start(result: SearchResult) -> dict[str, Any]:
    """The flags that `hetplan emit` writes for the plan's target, or why it writes none."""
    name = emit_target(result)
    if name not in TRAINERS:
        return {"refused": [], "launch": None}
    try:
        options = EmissionOptions()
        launch = emission_for(with_node_names(result), trainer_named(name), options).launch
    except InputError:
        return {"refused": [*refused_lines(result)], "launch": None}
    again = {words[0] for agent in launch.agent_arguments for words in agent}
    return {
        "refused": [],
        "launch": launch,
        "target": "" if name == result.plan.target else name,
        "program": _shell_words(launch.program),
        "flags": [_shell_words(words) for words in launch.arguments if words[0] not in again],
        "own": [
            [*map(_shell_words, agent)] for agent in dict.fromkeys(launch.agent_arguments) if agent
        ],
        "variables": [f"{name}={_shell_words([value])}" for name, value in launch.environment],
    }


def _stage(row: StageRow, several: bool) -> dict[str, Any]:
    """A row of the table of stages."""
    degrees = [(name, format_each(getattr(row, name))) for name in ("tp", "cp", "ep", "dp")]
    least, most = (f"{100 * part:.0f}" for part in (row.least_busy, row.most_busy))
    return {
        "row": row,
        "cost": row.cost,
        "pipelines": number_runs(row.pipelines) if several else "",
        "degrees": ", ".join(f"{n} {value}" for n, value in degrees if value != "1") or "1 device",
        "microbatch": format_each(row.microbatch_size),
        "busy": f"{least} %" if least == most else f"{least}-{most} %",
    }


# ---- timeline


def _timelines(view: PlanView, kinds: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    """Every pipeline, equal ones together."""
    step = view.timeline.step_seconds
    unlike = distinct(view.timeline)
    shown = unlike[:MAX_PIPELINES]
    digits = max(0, 6 - math.floor(math.log10(step)))
    for numbers, pipeline in shown:
        drawn = charts.drawn(pipeline, most // len(shown))
        several = len(view.timeline.pipelines) > 1
        yield {
            "name": f"Pipeline{'s' * (len(numbers) > 1)} {number_runs(numbers)}" * several,
            "svg": charts.timeline_svg(pipeline, drawn, step, kinds),
            "rows": [
                {"kind": charts.kind_number(kinds, stage.device), "island": stage.island}
                for stage in pipeline.stages
            ],
            "phases": [*_phases(pipeline, step)],
            "ticks": [*ticks(step)],
            "height": len(pipeline.stages) * charts.ROW,
            "apart": max(map(len, drawn.stages)) <= MOST_APART,
            "left_out": drawn.left_out,
            "cut": (drawn.cut_from_seconds, drawn.cut_to_seconds),
            "missing": len(unlike) - len(shown),
            "waits": 1.0 - sum(
                bar.end_seconds - bar.start_seconds
                for stage in pipeline.stages for bar in stage.passes
            ) / (step * len(pipeline.stages)),
            "words": _picture_words(pipeline, step),
            "data": {
                "step_seconds": step,
                "names": charts.NAMES,
                "phases": charts.phases(pipeline),
                "stages": [
                    charts.bar_data(stage, bars, digits)
                    for stage, bars in zip(pipeline.stages, drawn.stages, strict=True)
                ],
            },
        }  # fmt: skip


def _picture_words(pipeline: PipelineTimeline, step: float) -> str:
    """What the picture of a pipeline shows, for those who do not see it."""
    microbatches = counted(pipeline.num_microbatches, "microbatch", "microbatches")
    return (
        f"{counted(len(pipeline.stages), 'stage')}, {microbatches}, schedule {pipeline.schedule}: "
        f"from the start of the step to its end at {seconds_words(step)}. The pipeline is empty "
        f"after {seconds_words(pipeline.end_seconds, step)}."
    )


def _phases(pipeline: PipelineTimeline, step: float) -> Iterator[dict[str, Any]]:
    """Name and place of each phase, in parts of the step."""
    warm, cool, end = charts.phases(pipeline)
    steady = pipeline.warm_up_end_seconds <= pipeline.cool_down_start_seconds
    names = ("warm-up", "steady" if steady else "no steady phase", "cool-down", "end of step")
    at = 0.0
    for name, to in zip(names, (warm, cool, end, step), strict=True):
        if to > at:
            yield {"name": name, "from": at / step, "to": to / step, "seconds": to - at}
        at = max(at, to)


# ---- charts with a row each


def _memory(rows: Sequence[StageRow]) -> Iterator[dict[str, Any]]:
    """Bytes on one device of every stage, by component, against what is there."""
    whole = 1.01 * max(
        max(row.cost.memory.total_bytes, row.cost.memory.available_bytes) for row in rows
    )
    for row in rows:
        use = row.cost.memory
        parts = [(name, float(getattr(use, field))) for name, field in MEMORY_PARTS]
        yield {
            "name": row.name,
            "pipelines": number_runs(row.pipelines),
            "kind": row.cost.device,
            "island": row.cost.island,
            "bar": charts.bar([(f"m-{n}", size) for n, size in parts], whole, use.available_bytes),
            "use": use,
            "part": use.total_bytes / use.available_bytes,
            "parts": parts,
            "data": {
                "pipelines": row.pipelines,
                "stages": [row.first, row.last],
                **{field: getattr(use, field) for _, field in MEMORY_PARTS},
                "available_bytes": use.available_bytes,
            },
        }


def _components(estimate: Estimate) -> Iterator[dict[str, Any]]:
    for each in estimate.components:
        yield {
            "name": each.component.value,
            "seconds": each.seconds,
            "part": each.seconds / estimate.step_seconds,
            "hidden": each.hidden_seconds,
            "note": each.note,
            "bar": charts.bar(
                [("part", each.seconds), ("hidden", each.hidden_seconds)], estimate.step_seconds
            ),
            "data": {
                "component": each.component.value,
                "seconds": each.seconds,
                "hidden_seconds": each.hidden_seconds,
            },
        }


def _use(estimate: Estimate, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """MFU of every kind."""
    for each in estimate.kinds:
        yield {
            "name": each.device,
            "use": each,
            "bar": ""
            if each.mfu is None
            else charts.bar([(f"k{charts.kind_number(kinds, each.device)}", each.mfu)], 1.0),
            "again": each.recomputed_flops / each.model_flops if each.model_flops else 0.0,
            "data": {
                "device": each.device,
                "mfu": each.mfu,
                "flops_per_second": each.flops_per_second,
            },
        }


def _links(links: Sequence[LinkUse], step: float) -> Iterator[dict[str, Any]]:
    """Fullest first."""
    for each in sorted(links, key=lambda one: -(one.share(step) or -1.0)):
        share = each.share(step)
        one = format_rate(float(f"{8 * each.one:.3g}"), "bit/s")
        room = f"{one} shared, each way" if not each.senders else f"{each.senders:,} x {one}"
        yield {
            "name": str(each.link),
            "carried": [(traffic.value, size) for traffic, size in each.carried],
            "use": each,
            "share": share,
            "room": "not known" if share is None else room,
            "bar": "" if share is None else charts.bar([("part", min(share, 1.0))], 1.0),
            "data": {
                "link": str(each.link),
                "bytes_per_step": each.bytes_per_step,
                "carried": {traffic.value: size for traffic, size in each.carried},
                "share": share,
                "step_at_half": each.at_half,
                "step_at_twice": each.at_twice,
            },
        }


def _unused_links(view: PlanView) -> Iterator[str]:
    """Pairs of islands between which nothing is sent: this plan does not feel half of a link."""
    question = view.result.inputs
    names = [each.name for each in usable_islands(question)]
    used = {frozenset((each.link.left, each.link.right)) for each in view.links}
    for one, two in combinations(names, 2):
        if frozenset((one, two)) not in used:
            yield f"{one} and {two}"


def _prices(prices: Sequence[ShadowPrice]) -> Iterator[dict[str, Any]]:
    """What changes are worth, the largest first; losses last."""
    whole = max((abs(each.least_gain) for each in prices), default=1.0)
    for each in prices:
        name = "comm" if each.least_gain < 0 else "part"
        yield {
            "price": each,
            "gain": gain_of(each),
            "bar": "" if each.note else charts.bar([(name, abs(each.least_gain))], whole),
            "data": {
                "kind": each.kind.value,
                "words": each.words,
                "least_gain": each.least_gain,
                "most_gain": each.most_gain,
                "same_plan_gain": each.same_plan_gain,
            },
        }


def _map(view: PlanView, kinds: Sequence[str]) -> dict[str, Any]:
    cluster, step = view.result.inputs.cluster, view.result.estimate.step_seconds
    used = {
        island.name: mine.mean(axis=1).tolist()
        for island, mine in used_devices(view.result.plan, cluster)
    }
    return {
        "svg": charts.cluster_map(cluster, used, view.links, step, kinds),
        "data": used,
    }


def _search(result: SearchResult) -> dict[str, Any] | None:
    """Bound, plan and what the bound rests on; None of a plan that was given."""
    certificate, step = result.certificate, result.estimate.step_seconds
    if certificate is None:
        return None
    low, high, share = result.estimate.step_range
    whole = max(high, step)
    proof = certificate.proof
    return {
        "bound": charts.bar([("part", certificate.lower_bound_seconds)], whole),
        "best": charts.bar([("part", step)], whole),
        "interval": charts.span(low, step, high, whole),
        "course": charts.course(certificate.course),
        "points": certificate.course,
        "ended": ENDED[certificate.status],
        "interval_name": share.replace(" ", SPACE),
        "low": low,
        "high": high,
        "certificate": certificate,
        "families": [] if proof is None else _closest(proof),
        "proof": proof,
        "data": {
            "lower_bound_seconds": certificate.lower_bound_seconds,
            "step_seconds": step,
            "gap": certificate.gap,
            "course": [
                [each.steps, each.best_seconds, each.lower_bound_seconds]
                for each in certificate.course
            ],
        },
    }  # fmt: skip


def _closest(proof: Proof) -> list[FamilyBound]:
    """Families whose bound is nearest to the certificate's, as many as somebody reads."""
    known = [each for each in proof.raised if each.bound_seconds is not None]
    return sorted(known, key=lambda each: each.bound_seconds or 0.0)[:MOST_FAMILIES]


def _alternatives(result: SearchResult) -> Iterator[dict[str, Any]]:
    whole = max((each.step_seconds for each in result.alternatives), default=1.0)
    for each in result.alternatives:
        yield {
            "plan": each,
            "layout": layout_words(each.plan),
            "bar": charts.bar([("part", each.step_seconds)], whole),
            "data": {
                "why": each.why,
                "step_seconds": each.step_seconds,
                "usd_per_step": each.usd_per_step,
                "devices": each.devices,
            },
        }


def _comparison(each: Comparison) -> dict[str, Any]:
    """A run beside its plan: both ranges on one scale, and the parts of the step."""
    measured, predicted = each.measured, each.predicted_interval
    whole = 1.05 * max(measured.p90_seconds, predicted.p90_seconds)
    largest = max(
        (abs(seconds) for part in each.parts
         for seconds in (part.measured_seconds, part.predicted_seconds)),
        default=1.0,
    )  # fmt: skip
    return {
        "run": each,
        "measured": charts.span(
            measured.p10_seconds, measured.median_seconds, measured.p90_seconds, whole
        ),
        "predicted": charts.span(
            predicted.p10_seconds, each.predicted_step_seconds, predicted.p90_seconds, whole
        ),
        "parts": [
            (
                part,
                charts.bar([("part", max(part.measured_seconds, 0.0))], largest),
                charts.bar([("hidden", max(part.predicted_seconds, 0.0))], largest),
            )
            for part in each.parts
        ],
        "data": {
            "measured_seconds": measured.median_seconds,
            "predicted_seconds": each.predicted_step_seconds,
            "parts": [asdict(part) for part in each.parts],
        },
    }


def _causes(view: PlanView) -> Iterator[dict[str, Any]]:
    """Whose predictions the step is made of, what they rest on, how far off each may be."""
    estimate = view.result.estimate
    known = {} if view.is_priced_anew else view.sources
    for each in estimate.causes:
        yield {
            "sources": ", ".join(sorted(known.get((each.cause, each.part), ()))),
            "cause": each.cause,
            "part": each.part.replace("_", " "),
            "seconds": each.seconds,
            "share": each.seconds / estimate.step_seconds,
            "low": each.seconds * math.exp(-each.log_halfwidth),
            "high": each.seconds * math.exp(each.log_halfwidth),
        }
