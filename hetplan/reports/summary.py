"""A plan on ten lines: what was found, what it costs, what limits it, how good it is.

`summarize` takes everything from the result, so a plan file says what the search said. More is
in `hetplan plan -v`, `hetplan explain` and the report.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from hetplan.cluster.libraries import island_library
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate_values import Estimate, StageEstimate
from hetplan.job.spec import RecomputeModule
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import NO_RECOMPUTE, Sharding, Stage
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import TARGETS
from hetplan.predict.predictor import MEASURED
from hetplan.reports.days import days_line, run_of
from hetplan.reports.energy import energy_line
from hetplan.reports.terminal import folded, table_lines
from hetplan.search.descriptions import devices_in_use
from hetplan.search.result import LIMITS_LEFT_OUT, OTHER_PARTS_LEFT_OUT, Certificate, SearchResult
from hetplan.search.space.allowed import allowed_cluster, apart
from hetplan.trainers import TRAINERS
from hetplan.units import GIBIBYTE, digits, format_each, format_range, format_seconds
from hetplan.whatif.plan_use import idle_islands
from hetplan.whatif.within_limits import full_limits

_WORTH_SAYING = 0.02
"""Parts of a step below this one are not in the ten lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Neighbouring stages of a pipeline that differ in their layers at most.

    They lie on the same islands, with the same degrees, microbatch size and recomputation.
    """

    pipelines: tuple[int, ...]
    """Those that have it; several only of `stage_rows` with `apart`."""
    first: int
    """Of the stages, counted from 0 in the pipeline."""
    last: int
    islands: tuple[Island, ...]
    """All of one device kind."""
    devices_per_stage: int
    tp: tuple[int, ...]
    """One value, or one for each part of a stage whose parts differ; so the next four."""
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    dp: tuple[int, ...]
    microbatch_size: tuple[int, ...]
    """Sequences of a microbatch on one data-parallel rank."""
    num_microbatches: int
    recompute: str
    layers: tuple[int, ...]
    """Transformer layers of each stage."""
    """Of the stages, on one device."""
    most_memory_bytes: float
    available_bytes: float
    least_busy: float
    """Part of the step in forward and backward passes."""
    most_busy: float
    cost: StageEstimate = field(repr=False)
    """Of the first of the stages."""

    @property
    def name(self) -> str:
        """`3`, or `3-5`."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def fits(self) -> bool:
        """Whether all its stages have room on their devices."""
        return self.most_memory_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A result and its stages, alike neighbours together."""

    result: SearchResult
    rows: tuple[StageRow, ...]

    def lines(self, width: int = 80) -> Iterator[str]:
        """The answer, the stages as a table and how good it is, in at most `width` columns."""
        yield from folded(_answer(self.result), width)
        yield ""
        yield from _table(self, width)
        yield ""
        yield from folded(_judgement(self.result), width)


def summarize(result: SearchResult) -> Summary:
    """The result with its runs of alike stages."""
    return Summary(result=result, rows=tuple(stage_rows(result)))


def short_kind(island: Island) -> str:
    """The device kind without its maker: `h100-80gb-sxm`."""
    return island.device.kind.removeprefix(f"{island.device.vendor}-")


def stage_rows(result: SearchResult, *, apart: bool = False) -> Iterator[StageRow]:
    """Runs of alike neighbouring stages, pipeline by pipeline.

    apart: stages whose layers or memory differ stand apart, and equal pipelines together.
    """
    cluster, costs = result.inputs.cluster, iter(result.estimate.stages)
    found: dict[object, list[StageRow]] = {}
    for p, pipeline in enumerate(result.plan.pipelines):
        stages = [(s, stage, next(costs)) for s, stage in enumerate(pipeline.stages)]

        def alike(each: tuple[int, Stage, StageEstimate]) -> object:
            _, stage, cost = each
            layers = tuple(chunk.stop - chunk.start for chunk in stage.chunks)
            own = (layers, cost.device, cost.memory) if apart else ()
            return _shape(stage, cluster), own

        runs = [(key, [*members]) for key, members in groupby(stages, key=alike)]
        same = tuple((key, len(members)) for key, members in runs) if apart else p
        if same in found:
            found[same] = [replace(r, pipelines=(*r.pipelines, p)) for r in found[same]]
        else:
            rows = (_row(p, pipeline.num_microbatches, members, result) for _, members in runs)
            found[same] = [*rows]
    return chain.from_iterable(found.values())


def _row(
    pipeline: int,
    microbatches: int,
    members: Sequence[tuple[int, Stage, StageEstimate]],
    result: SearchResult,
) -> StageRow:
    """Alike stages of a pipeline, with their numbers there."""
    first, stage, cost = members[0]
    memory = [each.memory.total_bytes for *_, each in members]
    busy = [each.busy_seconds / result.estimate.step_seconds for *_, each in members]
    return StageRow(
        pipelines=(pipeline,),
        first=first,
        last=members[-1][0],
        islands=_islands(stage, result.inputs.cluster),
        devices_per_stage=sum(each.num_devices for each in stage.replicas),
        tp=_degrees(stage, "tp"),
        cp=_degrees(stage, "cp"),
        ep=_degrees(stage, "ep"),
        dp=_degrees(stage, "dp"),
        microbatch_size=_degrees(stage, "microbatch_size"),
        num_microbatches=microbatches,
        recompute=_recompute(stage, result.inputs.model),
        layers=tuple(each.transformer_layers for *_, each in members),
        most_memory_bytes=max(memory),
        available_bytes=cost.memory.available_bytes,
        least_busy=min(busy),
        most_busy=max(busy),
        cost=cost,
    )


def _islands(stage: Stage, cluster: Cluster) -> tuple[Island, ...]:
    firsts = (replica.devices[0].start for replica in stage.replicas)
    return tuple(dict.fromkeys(map(cluster.island_of_device, firsts)))


def _degrees(stage: Stage, name: str) -> tuple[int, ...]:
    """Of every part of the stage, once where they agree; copies of the parts add up."""
    values = tuple(getattr(each, name) for each in stage.replicas)
    if name == "dp" and len({(each.tp, each.cp) for each in stage.replicas}) == 1:
        return (sum(values),)
    return values[:1] if len({*values}) == 1 else values


def _shape(stage: Stage, cluster: Cluster) -> object:
    """What the stages of one row have in common."""
    parts = [(each.tp, each.cp, each.ep, each.dp, each.microbatch_size) for each in stage.replicas]
    names = tuple(each.name for each in _islands(stage, cluster))
    return names, tuple(parts), stage.recompute


def _answer(result: SearchResult) -> Iterator[str]:
    """What the plan is and what it costs."""
    estimate, run = result.estimate, run_of(result)
    yield _plan_words(result)
    step = format_range(estimate.step_seconds, *estimate.step_range)
    yield f"{step}, {estimate.tokens_per_second:,.0f} tokens/s"
    if run is not None:
        yield days_line(run)
    if estimate.kinds:
        yield _use(result)
    if result.certificate is None:
        yield energy_line(result)


def _plan_words(result: SearchResult) -> str:
    """`megatron on 64 of 112 devices: 8 stages, 64 microbatches of 1, recompute full`."""
    plan, cluster = result.plan, allowed_cluster(result.inputs.cluster, result.inputs.job)
    pipelines = plan.pipelines
    used, usable = devices_in_use(plan), sum(each.num_usable_devices for each in cluster.islands)
    where = f"{used:,} of {usable:,}" if used < usable else f"all {usable:,}"
    stages = format_each(len(each.stages) for each in pipelines)
    batches = format_each(each.num_microbatches for each in pipelines)
    sizes = format_each(each.microbatch_size for each in plan.replicas)
    words = [
        *([f"{len(pipelines)} pipelines"] if len(pipelines) > 1 else []),
        f"{stages} stage{'' if stages == '1' else 's'}",
        f"{batches} microbatch{'' if batches == '1' else 'es'}"
        + (f" of {sizes}" if sizes.isdecimal() else ""),
    ]
    schedules = format_each(each.schedule.name for each in pipelines)
    if schedules != "1f1b":
        chunks = format_each(each.schedule.virtual_stages for each in pipelines)
        words.append(schedules + (f" with {chunks} chunks" if chunks != "1" else ""))
    recompute = format_each(_recompute(each, result.inputs.model) for each in plan.stages)
    if recompute != NO_RECOMPUTE.words:
        words.append(f"recompute {recompute}")
    if plan.sharding is not Sharding.NONE:
        words.append(f"{plan.sharding.value} sharded")
    if plan.optimizer_offload:
        words.append("optimizer in host memory")
    trainer = "any trainer" if plan.target == "any" else plan.target
    return f"{trainer} on {where} devices: {', '.join(words)}"


def _recompute(stage: Stage, model: ModelSpec) -> str:
    """`layernorm+act`: Megatron-LM's word for activations, moe_act, is wrong without experts."""
    dense = not experts_of(model, 0, len(model.layers))
    words = stage.recompute.words
    return words.replace(RecomputeModule.ACTIVATION.value, "act") if dense else words


def _use(result: SearchResult) -> str:
    """`MFU 56.7% (166 TFLOP/s per device): a100-80gb-sxm 57.7% (180), mi210 46.4% (83.9)`."""
    estimate = result.estimate
    whole, rate = estimate.mfu, f"{digits(estimate.flops_per_second / 1e12)} TFLOP/s per device"
    line = rate if whole is None else f"MFU {whole:.1%} ({rate})"
    if len(estimate.kinds) == 1:
        return line
    names = {island.device.kind: short_kind(island) for island in result.used_islands}
    own = (
        f"{names[each.device]} {'' if each.mfu is None else f'{each.mfu:.1%} '}"
        f"({digits(each.flops_per_second / 1e12)})"
        for each in estimate.kinds
    )
    return f"{line}: {', '.join(own)}"


def _table(summary: Summary, width: int) -> Iterator[str]:
    """One line for each row; layers are folded where there is no room for all columns."""
    rows, pipelines = summary.rows, summary.result.plan.pipelines
    degrees = [
        name
        for name in ("tp", "cp", "ep", "dp")
        if name in _ALWAYS or any({*getattr(row, name)} != {1} for row in rows)
    ]
    sizes = len({row.microbatch_size for row in rows}) > 1
    recomputes = len({row.recompute for row in rows}) > 1
    places = {island.name for row in rows for island in row.islands}
    named = len(places) > len({row.islands[0].device.kind for row in rows})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("stages", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    table.add_column(" x ".join(degrees), no_wrap=True)
    if sizes:
        table.add_column("microbatch", no_wrap=True, justify="right")
    if recomputes:
        table.add_column("recompute", no_wrap=True)
    table.add_column("layers", overflow="fold", min_width=len("layers"))
    table.add_column("memory, GiB", no_wrap=True, justify="right")
    table.add_column("busy", no_wrap=True, justify="right")
    for row in rows:
        kinds = " + ".join(dict.fromkeys(map(short_kind, row.islands)))
        place = " + ".join(island.name for island in row.islands)
        place = f" {place}" if named and place != kinds else ""
        full = "" if row.fits else " TOO FULL"
        table.add_row(
            f"{row.pipelines[0]}: {row.name}" if len(pipelines) > 1 else row.name,
            escape(f"{row.devices_per_stage:,} {kinds}{place}"),
            " x ".join("/".join(map(str, getattr(row, name))) for name in degrees),
            *(["/".join(map(str, row.microbatch_size))] if sizes else []),
            *([row.recompute] if recomputes else []),
            _layers(row.layers),
            f"{gibibytes(row.most_memory_bytes)} of {gibibytes(row.available_bytes)}{full}",
            f"{_span(100 * row.least_busy, 100 * row.most_busy)} %",
        )
    lines = [*table_lines(table, width)]
    if any(_CUT in line for line in lines) or not lines[0].endswith("busy"):
        # Cells take more lines, instead of losing their ends; the line above has recomputation.
        table.columns = [each for each in table.columns if each.header != "recompute"]
        for column, room in zip(table.columns, _widths(table, width), strict=True):
            column.no_wrap, column.overflow, column.width = False, "fold", room
        lines = [*table_lines(table, width)]
    return iter(lines)


def _widths(table: Table, width: int) -> list[int]:
    """Of columns that take more lines: their longest words, and what is left by need."""
    cells = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(len(word) for cell in own for word in cell.split()) for own in cells]
    room = width - sum(widths) - 2 * (len(widths) - 1)
    for at in sorted(range(len(widths)), key=lambda at: max(map(len, cells[at])) - widths[at]):
        more = min(max(room, 0), max(map(len, cells[at])) - widths[at])
        widths[at], room = widths[at] + more, room - more
    return widths


_CUT = "\u2026"
"""What rich writes where a cell lost its end; of columns beyond the last one it writes nothing."""


_ALWAYS = ("tp", "dp")
"""Degrees that are shown even where they are 1."""


def gibibytes(size: float) -> str:
    """A number of GiB, whole above ten."""
    number = size / GIBIBYTE
    return f"{number:.0f}" if number >= 10.0 else f"{number:.2g}"


def _layers(layers: tuple[int, ...]) -> str:
    """`10, 11, 5 x 10, 9`."""
    runs = ((number, len(list(run))) for number, run in groupby(layers))
    return ", ".join(f"{number}" if count == 1 else f"{count} x {number}" for number, count in runs)


def _span(least: float, most: float) -> str:
    low, high = f"{least:.0f}", f"{most:.0f}"
    return low if low == high else f"{low}-{high}"


def _judgement(result: SearchResult) -> Iterator[str]:
    """What limits the plan, what it leaves out, how good it is and what it rests on."""
    yield f"where the step goes: {step_words(result.estimate)}"
    yield from _left_out(result)
    if result.objective:
        yield f"chosen by {result.objective}"
    if result.certificate is not None:
        yield _proof(result, result.certificate)
    elif not result.objective:
        yield "priced, not searched: `hetplan plan` finds the fastest"
    yield _basis(result.estimate)


def step_words(estimate: Estimate) -> str:
    """`compute 84%, bubble 9%, tp 5%; stage 5 is the busiest`."""
    step = estimate.step_seconds
    parts = sorted(estimate.components, key=lambda each: -each.seconds)
    words = ", ".join(
        f"{each.component.value} {each.seconds / step:.0%}"
        for each in parts
        if each.seconds >= _WORTH_SAYING * step
    )
    s, _ = max(enumerate(estimate.stages), key=lambda each: each[1].busy_seconds)
    several = len(estimate.stages) > 1
    return f"{words}; {estimate.stage_name(s)} is the busiest" if several else words


def _left_out(result: SearchResult) -> Iterator[str]:
    """Idle devices by island, and why as far as that is known without another search."""
    if result.idle:
        from hetplan.reports.explained import idle_lines  # with the search: a second

        yield from idle_lines(result.idle, result)
        return
    cluster = allowed_cluster(result.inputs.cluster, result.inputs.job)
    idle = list(idle_islands(result.plan, cluster))
    if not idle:
        return
    names = ", ".join(f"{left:,} {short_kind(island)}" for island, left in idle[:_MOST_NAMED])
    more = f" and devices of {len(idle) - _MOST_NAMED} more islands" * (len(idle) > _MOST_NAMED)
    full = [full_limits(result, island.name) for island, _ in idle]
    if all(full):
        limits = ", ".join(dict.fromkeys(each[0] for each in full))
        yield f"left idle: {names}{more}: no room for more of them within {limits}"
        return
    libraries = {island_library(island) for island, _ in idle}
    used = {island_library(island) for island in result.used_islands}
    if apart(cluster, result.inputs.job) and not libraries & used:
        why = f"{result.plan.target} has one library of collectives, here {' '.join(sorted(used))}"
    else:
        why = "`hetplan explain idle` says why, and from where they pay"
    yield f"left idle: {names}{more}: {why}"


_MOST_NAMED = 6
"""Islands that a line names."""


def _proof(result: SearchResult, certificate: Certificate) -> str:
    """How far the plan can be from the best one."""
    least = format_seconds(float(f"{certificate.lower_bound_seconds:.4g}"))
    parts = [OTHER_PARTS_LEFT_OUT] if OTHER_PARTS_LEFT_OUT in certificate.space else []
    if certificate.status == "optimal":
        proven = f"proven within {certificate.gap:.1%} of the best: no plan takes less than {least}"
        return "; ".join([proven, *parts])
    other = "this one has another aim" if result.objective else ""
    closing = other or "the search could not close what is left"
    if LIMITS_LEFT_OUT in certificate.space:
        closing = "; ".join([LIMITS_LEFT_OUT, *parts])
    ended = {
        "limit": "its limit ended the search: plan longer",
        "interrupted": "the search was interrupted: plan again, or resume its journal",
    }.get(certificate.status, closing)
    if not certificate.lower_bound_seconds:
        return f"not proven: no bound was found, {ended}"
    return f"a plan up to {certificate.gap:.1%} shorter could exist (bound {least}); {ended}"


def _basis(estimate: Estimate) -> str:
    """What the predictions rest on."""
    *others, last = estimate.sources
    sources = f"{', '.join(others)} and {last}" if others else last
    if MEASURED in estimate.sources:
        return f"predicted from {sources} figures"
    return (
        f"predicted from {sources} figures; nothing was measured here: `hetplan profile for-job` "
        "says what to measure first"
    )


def emit_target(result: SearchResult) -> str:
    """Trainer whose files `hetplan emit` writes for the plan; as it is without --target, but of
    Megatron-LM's plans on Ascend MindSpeed, which alone takes them.
    """
    ascend = any(island_library(each) == "hccl" for each in result.used_islands)
    return "mindspeed" if result.plan.target == "megatron" and ascend else result.plan.target


def emit_command(result: SearchResult, name: str) -> str:
    """`hetplan emit plan.json`, with --target where the plan's own is not the one."""
    target = emit_target(result)
    return f"hetplan emit {name}" + f" --target {target}" * (target != result.plan.target)


def next_lines(result: SearchResult, file: Path, *, drafted: bool = False) -> Iterator[str]:
    """The commands that a reader of the plan in this file wants next.

    drafted: the cluster was described on the command line, so that no file of it can be edited.
    """
    name = shlex.quote(str(file))
    yield f"next: hetplan report {name}, or hetplan explain {name}"
    nameless = [each.name for each in result.used_islands if not each.node_names]
    if result.plan.target == "native":
        yield f"to start it: hetplan launch {name}"
    elif result.plan.target not in TRAINERS:
        names = ", ".join(each for each in TARGETS if each in TRAINERS)
        yield f"to start it: plan with --target {names} or native"
    elif drafted:
        yield "to start it: hetplan init with the same words writes files to correct first"
    elif nameless:
        yield (
            f"to start it: give node_names of {', '.join(nameless[:_MOST_NAMED])} in the cluster "
            f"file, then {emit_command(result, name)} --cluster FILE --out DIR"
        )
    else:
        yield f"to start it: {emit_command(result, name)} --out DIR"
