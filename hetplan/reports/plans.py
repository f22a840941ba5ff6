"""What a person sees of a plan: its stages, what it costs, how good it is and what to doubt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.markup import escape
from rich.table import Table

from hetplan.cost.estimate_values import Estimate, StageEstimate
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan, Stage, expand
from hetplan.search.result import Certificate, HomogeneousSum, SearchResult
from hetplan.units import format_bytes, format_seconds


def stage_table(model: ModelSpec, plan: Plan, estimate: Estimate) -> Table:
    """One row per stage: where it runs, its layers, its times per microbatch, its memory."""
    table = Table(title=_title(plan, estimate), title_justify="left")
    for name in ("stage", "island", "devices"):
        table.add_column(name, overflow="fold")
    for name in ("layers", "forward", "backward", "waits", "reduce", "optimizer", "memory"):
        table.add_column(name, justify="right", overflow="fold")
    stages = plan.pipelines[0].stages
    for index, (stage, cost) in enumerate(zip(stages, estimate.stages, strict=True)):
        table.add_row(
            str(index),
            escape(cost.island),
            f"{stage.replicas[0].num_devices} x {escape(cost.device)}",
            _layers(model, stage),
            format_seconds(cost.forward_seconds),
            format_seconds(cost.backward_seconds),
            format_seconds(cost.wait_seconds),
            format_seconds(cost.reduction_seconds),
            format_seconds(cost.optimizer_seconds),
            _memory(cost),
        )
    return table


def _title(plan: Plan, estimate: Estimate) -> str:
    pipeline = plan.pipelines[0]
    replica = pipeline.stages[0].replicas[0]
    recompute = pipeline.stages[0].recompute.granularity.value
    return (
        f"tp {replica.tp}, dp {replica.dp}, pp {len(pipeline.stages)}, "
        f"microbatch size {replica.microbatch_size}, {estimate.num_microbatches} microbatches, "
        f"recompute {recompute}, target {escape(plan.target)}\n"
        "forward and backward are of one microbatch; waits, reduce and optimizer of the whole step"
    )


def _layers(model: ModelSpec, stage: Stage) -> str:
    """`E+10`, `12`, `10+H`: transformer layers, with E for the embedding and H for the head."""
    start, stop = stage.chunks[0].start, stage.chunks[-1].stop
    holds_embedding = start == 0
    holds_head = stop == len(model.layers)
    count = stop - start - holds_embedding - holds_head
    return ("E+" if holds_embedding else "") + str(count) + ("+H" if holds_head else "")


def _memory(cost: StageEstimate) -> str:
    memory = cost.memory
    mark = "" if memory.fits else "  DOES NOT FIT"
    return f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.available_bytes)}{mark}"


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    """The step, its interval, its throughput and what to know before trusting them."""
    interval = estimate.interval
    yield (
        f"step {format_seconds(estimate.step_seconds)} (p10 "
        f"{format_seconds(interval.p10_seconds)}, p90 {format_seconds(interval.p90_seconds)}), "
        f"{estimate.tokens_per_second:,.0f} tokens/s, predicted from "
        f"{' and '.join(estimate.sources)} figures"
    )
    for note in grouped(estimate.warnings):
        yield f"note: {note}"


def grouped(notes: Iterable[str]) -> Iterator[str]:
    """Notes of the form `what: text`, those of one text in one line: `text: what; what`."""
    subjects: dict[str, list[str]] = {}
    for note in notes:
        subject, _, text = note.rpartition(": ")
        subjects.setdefault(text, []).append(subject)
    for text, whose in subjects.items():
        if len(whose) > 1:
            yield f"{text}: {'; '.join(whose)}"
        else:
            yield f"{whose[0]}: {text}" if whose[0] else text


def certificate_line(certificate: Certificate, step_seconds: float) -> str:
    """How far the plan can be from the best one, in words."""
    if certificate.status == "optimal":
        verdict = "proven within the gap that was asked for"
    else:
        verdict = f"search ended by {certificate.status} before the gap that was asked for"
    return (
        f"no plan of the space is faster than {format_seconds(certificate.lower_bound_seconds)}; "
        f"this one takes {format_seconds(step_seconds)}, gap {certificate.gap:.2%} ({verdict}; "
        f"{certificate.candidates} candidates, {certificate.pruned_by_bound} pruned by bound, "
        f"{certificate.searched} searched, {certificate.replays} replays)"
    )


def second_opinion_line(bound_seconds: float | None) -> str:
    """What the integer model says of the same degrees."""
    if bound_seconds is None:
        return "the integer model (CP-SAT) was not asked for a second opinion"
    return (
        "second opinion by the integer model (CP-SAT): no plan of these degrees is faster than "
        f"{format_seconds(bound_seconds)}"
    )


def homogeneous_lines(figure: HomogeneousSum) -> Iterator[str]:
    """The plan against the sum of what its kinds reach alone."""
    for kind in figure.kinds:
        alone = f"{kind.tokens_per_second:,.0f} tokens/s alone (gap {kind.gap:.1%})"
        if kind.reason:
            alone = f"no plan alone ({kind.reason}); its roofline counts"
        peak = kind.roofline_tokens_per_second
        roofline = "no peak rate known" if peak is None else f"roofline {peak:,.0f} tokens/s"
        yield f"{kind.devices} x {kind.device}: {alone}, {roofline}"
    yield (
        f"homogeneous-sum ratio {_percent(figure.homogeneous_sum_ratio)} (predicted on both "
        f"sides), roofline ratio {_percent(figure.roofline_ratio)}"
    )


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.2%}"


def device_lines(result: SearchResult) -> Iterator[str]:
    """Devices that the plan leaves idle although they may be used, by island."""
    cluster, forbidden = result.inputs.cluster, result.inputs.job.forbid
    unused = set(expand(result.plan.unused_devices))
    idle = []
    for island in cluster.islands:
        if island.name in forbidden.islands:
            continue
        first = cluster.first_device(island.name)
        usable = [
            first + node * island.devices_per_node + local
            for node in island.usable_nodes
            if f"{island.name}/{node}" not in forbidden.nodes
            for local in range(island.devices_per_node)
        ]
        count = len(unused.intersection(usable))
        if count:
            idle.append(f"{count} of {len(usable)} of {island.name}")
    if idle:
        yield f"left idle: {', '.join(idle)}: no plan that uses them was found to be faster"


def result_lines(result: SearchResult) -> Iterator[str]:
    """Everything about a search result below its stage table."""
    yield from estimate_lines(result.estimate)
    yield from device_lines(result)
    tokens = result.inputs.job.total_tokens
    if tokens is not None:
        duration = format_seconds(tokens / result.estimate.tokens_per_second)
        yield f"{tokens:,} tokens take {duration} at this step time, without a pause"
    if result.certificate is None:
        yield "no certificate: the layout was given, not searched"
        return
    yield certificate_line(result.certificate, result.estimate.step_seconds)
    yield second_opinion_line(result.certificate.integer_model_bound_seconds)
    yield f"searched: {result.certificate.space}"
