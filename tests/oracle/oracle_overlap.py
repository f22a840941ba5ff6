"""What is left of a reduction or a gathering that runs beside passes: the oracle's own replay.

Trainers that hide these have one pipeline. Taken from the product are single numbers: buckets of so
many parameters and slow-downs of a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetplan.cost.step_model.overlap import bucket_count, slowdowns

if TYPE_CHECKING:
    from oracle_price import Costs, PlacedPipeline


def hidden_beside(
    costs: Costs, pipeline: PlacedPipeline, s: int, seconds: float, *, gathers: bool
) -> float:
    """What a stage's communication of so many seconds adds to the step."""
    stage, stages = pipeline.stages[s], len(pipeline.stages)
    at, forward, backward = costs.stage(stage)
    replica = stage.replicas[at]
    island = costs.cluster.island_of_device(replica.devices[0].start)
    slow = slowdowns(island.device)
    held = [sum(costs.parameters(replica, (chunk,))) for chunk in stage.chunks]
    ranks = replica.dp * replica.cp
    if pipeline.chunks == 1:
        buckets = bucket_count(sum(costs.parameters(replica, stage.chunks)), ranks)
    else:
        buckets = bucket_count(max(held), ranks)
    sent: list[float] = []
    computed: list[float] = []
    order = range(len(held)) if gathers else reversed(range(len(held)))
    m = pipeline.microbatches
    group = min(m, stages) if gathers else (m - 1) % stages + 1
    for c in order:
        passes = forward[c] if gathers else backward[c]
        more = (group - 1) * passes if pipeline.chunks > 1 else 0.0
        share = seconds * held[c] / sum(held) / buckets
        if gathers:
            sent += [*[share] * buckets, 0.0]
            computed += [*[passes / buckets] * buckets, more]
        else:
            sent += [0.0, *[share] * buckets]
            computed += [more, *[passes / buckets] * buckets]
    if gathers:
        both = _both(sent, computed, slow.communication, slow.compute)
    else:
        both = _both(computed, sent, slow.compute, slow.communication)
    hidden = both / slow.communication
    return seconds - hidden + both * (1.0 - 1.0 / slow.compute)


def hidden_part(
    costs: Costs, pipeline: PlacedPipeline, s: int, seconds: float, part: float
) -> float:
    """The same of one of several groups of a stage: beside this part of one backward pass."""
    stage = pipeline.stages[s]
    at, _, backward = costs.stage(stage)
    replica = stage.replicas[at]
    slow = slowdowns(costs.cluster.island_of_device(replica.devices[0].start).device)
    whole = sum(costs.parameters(replica, stage.chunks))
    buckets = bucket_count(part * whole, replica.dp * replica.cp)
    passes = [part * sum(backward) / buckets] * buckets
    both = _both(passes, [seconds / buckets] * buckets, slow.compute, slow.communication)
    return seconds - both / slow.communication + both * (1.0 - 1.0 / slow.compute)


def _both(leads: list[float], follows: list[float], lead_slow: float, follow_slow: float) -> float:
    """Seconds in which both run; an item of `follows` waits for the same item of `leads`."""
    leads, follows = [*leads], [*follows]
    i = j = 0
    both = 0.0
    while i < len(leads):
        if leads[i] <= 1e-18:
            i += 1
        elif j < i and follows[j] <= 1e-18:
            j += 1
        elif j < i:
            wall = min(leads[i] * lead_slow, follows[j] * follow_slow)
            both += wall
            leads[i] -= wall / lead_slow
            follows[j] -= wall / follow_slow
        else:
            i += 1  # nothing to run beside: it runs alone to its end
    return both
