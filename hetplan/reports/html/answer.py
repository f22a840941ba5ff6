"""The answer: what a plan is and what it costs, in two sentences and a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.cost.estimate_values import Estimate, StepRange
from hetplan.predict.predictor import MEASURED
from hetplan.reports.days import days_line, failure_words, lost_words, run_of
from hetplan.reports.html.values import PlanView
from hetplan.reports.html.words import (
    bytes_words,
    range_words,
    seconds_words,
    share_words,
)
from hetplan.reports.summary import next_lines
from hetplan.search.descriptions import devices_in_use, layout_words
from hetplan.search.result import SearchResult
from hetplan.search.space.allowed import allowed_cluster
from hetplan.units import counted
from hetplan.whatif.plan_use import used_devices


def headline(result: SearchResult) -> str:
    """What the plan is and what it costs, in two sentences."""
    estimate, inputs, plan = result.estimate, result.inputs, result.plan
    step = estimate.step_seconds
    cluster = allowed_cluster(inputs.cluster, inputs.job)
    usable = sum(island.num_usable_devices for island in cluster.islands)
    stages = counted(len(plan.stages), "stage")
    if len(plan.pipelines) > 1:
        stages += f" of {len(plan.pipelines)} pipelines"
    trainer = "any trainer" if plan.target == "any" else plan.target
    mfu = "" if estimate.mfu is None else f", MFU {share_words(estimate.mfu)}"
    fits = "" if estimate.fits else " It does not fit in memory."
    return (
        f"{inputs.model.name} trains under {trainer} in {stages} on {devices_in_use(plan):,} of "
        f"{counted(usable, 'device')}. A step is predicted to take {_step_words(estimate, step)}: "
        f"{estimate.tokens_per_second:,.0f} tokens/s{mfu}.{fits}"
    )


def _step_words(estimate: Estimate, step: float) -> str:
    """A step with its interval."""
    within = estimate.step_range
    own, low, high = (seconds_words(each, step) for each in (step, *within[:2]))
    return f"{own} {range_words(within.share, low, high)}"


def facts(view: PlanView) -> Iterator[tuple[str, str]]:
    """The table below the answer, most asked first."""
    result = view.result
    estimate, job = result.estimate, result.inputs.job
    step, within = estimate.step_seconds, estimate.step_range
    tokens = estimate.tokens_per_second * step
    least, most = (f"{tokens / end:,.0f}" for end in (within.high_seconds, within.low_seconds))
    yield "Step", _step_words(estimate, step)
    yield (
        "Tokens per second",
        f"{estimate.tokens_per_second:,.0f} {range_words(within.share, least, most)}",
    )
    if estimate.kinds:
        yield "MFU", _mfu_words(estimate, within)
    run = run_of(result)
    if run is not None:
        yield "Whole run", days_line(run)
        yield "Lost time", lost_words(run)
        yield "Failures", failure_words(run)
        if run.notes:
            yield "Assumed of the run", "; ".join(run.notes)
    if view.usd_per_step is not None:
        yield "Price", f"{view.usd_per_step:,.4g} USD per step"
    yield "Trainer", result.plan.target
    yield "Layout", layout_words(result.plan)
    batch = f"{job.global_batch_size:,} sequences of {job.sequence_length:,} tokens"
    yield "Batch", f"{batch}, {job.precision.value}"
    yield "Devices", _devices(result)
    yield "Fullest stage", _fullest(estimate)
    yield "Proof", _proof(result)
    unmeasured = "" if MEASURED in estimate.sources else "; nothing was measured here"
    yield "Predicted from", f"{', '.join(estimate.sources)} figures{unmeasured}"
    *_, start = next_lines(result, Path(view.name))
    name, _, how = start.partition(": ")
    yield name.capitalize(), how


def _mfu_words(estimate: Estimate, within: StepRange) -> str:
    rate = f"{estimate.flops_per_second / 1e12:,.3g} TFLOP/s per device"
    if estimate.mfu is None:
        return f"not known, as a kind has no peak rate; {rate}"
    flops = estimate.mfu * estimate.step_seconds
    least, most = (share_words(flops / end) for end in (within.high_seconds, within.low_seconds))
    return f"{share_words(estimate.mfu)} {range_words(within.share, least, most)}; {rate}"


def _fullest(estimate: Estimate) -> str:
    """The stage that fills most of its devices' memory."""
    uses = [stage.memory for stage in estimate.stages]
    part, at = max((use.total_bytes / use.available_bytes, at) for at, use in enumerate(uses))
    words = f"{bytes_words(uses[at].total_bytes)} of {bytes_words(uses[at].available_bytes)}"
    fits = "" if estimate.fits else "; DOES NOT FIT"
    return f"{words}, {share_words(part)} ({estimate.stage_name(at)}){fits}"


def _proof(result: SearchResult) -> str:
    certificate = result.certificate
    if certificate is None:
        return "none: the layout was given, not searched"
    least = seconds_words(certificate.lower_bound_seconds, result.estimate.step_seconds)
    return f"within {share_words(certificate.gap)} of the best plan: none takes less than {least}"


def _devices(result: SearchResult) -> str:
    """`640 x a100, 128 x mi210`."""
    found = [
        f"{int(mine.sum()):,} x {island.device.kind} of {island.name}"
        for island, mine in used_devices(result.plan, result.inputs.cluster)
        if mine.any()
    ]
    return ", ".join(found)
