"""What it usually means when a part of the step is off, and which measurement to repeat.

The part that is off most in seconds is named, once it is off by more than the run's own steps lie
apart and by more than 1 % of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.spec import Link
from hetplan.launchers.compare_parts import REST
from hetplan.launchers.compare_steps import devices_of
from hetplan.launchers.compare_timers import Quantity
from hetplan.launchers.compare_values import Culprit, PartRow, StepSpread
from hetplan.predict.causes import link_cause
from hetplan.search.result import SearchResult

MIN_SHARE = 0.01
"""Of the step; less is below what any fit promises."""

_SLOWER = {
    "pass": (
        "the devices compute slower than in their profile: lower clocks or a power cap, other "
        "kernels or dropout than were measured, or tensor-parallel groups that wait"
    ),
    "wait": (
        "the stages are less balanced than planned, or transfers between them are slower or block "
        "the passes: a link below its figure, sends that the trainer does not overlap, or one slow "
        "node that all others wait for"
    ),
    "reduction": (
        "the data-parallel reduction is slower than its link: groups that stride over nodes share "
        "NICs, or less of it hides behind the backward pass"
    ),
    "embedding": "one end of the pipeline waits for the other before it sums the tied embedding",
    "end": (
        "the update is slower than memory bandwidth says: unfused kernels, state in host memory, "
        "or gathering that was thought hidden"
    ),
    "rest": (
        "time outside of all timers that the log has: loading data, logging, garbage collection, "
        "barriers with the slowest rank, or parts whose timers are off (Megatron-LM's passes need "
        "--timing-log-level 2)"
    ),
}
_FASTER = {
    "pass": "better kernels than were measured (fused attention, compilation), or higher clocks",
    "wait": "transfers overlap where the plan lets stages wait for them",
    "reduction": "more of the reduction hides behind the backward pass than was planned",
    "embedding": "the sum of the tied embedding is hidden or left out",
    "end": "a fused or sharded optimizer where the plan has another",
    "rest": "the plan counts waits at the end of the step that this trainer does not have",
}


def culprit_of(
    parts: Sequence[PartRow], spread: StepSpread, result: SearchResult
) -> Culprit | None:
    """The part that is off most; None where none is beyond the run's own spread."""
    if not parts:
        return None
    worst = max(parts, key=lambda row: abs(row.difference_seconds))
    difference = worst.difference_seconds
    apart = (spread.p90_seconds - spread.p10_seconds) / 2
    if abs(difference) <= max(apart, MIN_SHARE * spread.median_seconds):
        return None
    kind = _kind(worst.part)
    meanings = _SLOWER if difference > 0 else _FASTER
    return Culprit(
        part=worst.part,
        difference_seconds=difference,
        meaning=meanings[kind],
        measure=_measurement(kind, result),
    )


def _kind(part: str) -> str:
    """Which sentence is about this part."""
    if part == REST:
        return "rest"
    if part in ("waits and reduction", Quantity.WAITS.value, Quantity.WAITS_TO_THE_END.value):
        return "wait"
    if part == Quantity.REDUCTION.value:
        return "reduction"
    if part == Quantity.EMBEDDING.value:
        return "embedding"
    return "pass" if "passes" in part else "end"


def _measurement(kind: str, result: SearchResult) -> str:
    """The command that measures again what the part was predicted from."""
    if kind in ("pass", "end"):
        stages = result.estimate.stages
        device = max(stages, key=lambda stage: stage.busy_seconds).device
        count = devices_of(result)
        if device == CPU_KIND and count > 1:
            return (
                f"torchrun --standalone --nproc-per-node {count} -m hetplan profile layers "
                "--device cpu --model MODEL --job JOB --again on all cores that train, because "
                "they slow each other, then hetplan fit"
            )
        return (
            "hetplan profile layers --model MODEL --job JOB --again on a free "
            f"{device}, then hetplan fit (`hetplan profile list` shows what there is)"
        )
    if kind == "rest":
        return (
            "no profile: switch all of the trainer's timers on and compare again; what is left is "
            "`data_loading` of the job, or a slow rank (`speed_spread` of its island)"
        )
    links = _reduction_links(result) if kind in ("reduction", "embedding") else _hop_links(result)
    if not links:
        return "hetplan profile links NAME under torchrun over the devices that reduce or send"
    return "; ".join(_link_command(link) for link in links)


def _link_command(link: Link) -> str:
    if link.samples is not None:
        return f"torchrun ... -m hetplan profile links {link.samples} --again, then hetplan fit"
    return (
        f"torchrun ... -m hetplan profile links NAME over the {link_cause(link)}, then `samples: "
        "NAME` at that link in the cluster file: it was never measured"
    )


def _hop_links(result: SearchResult) -> list[Link]:
    """Links between neighbouring stages, the slowest first, two at most."""
    cluster = result.inputs.cluster
    found: dict[str, Link] = {}
    names = [stage.island for stage in result.estimate.stages]
    for left, right in pairwise(names):
        link = cluster.island(left).inter_node if left == right else None
        link = link or cluster.link_between(left, right)
        found[link_cause(link)] = link
    return sorted(found.values(), key=lambda each: each.goodput_bytes_per_second)[:2]


def _reduction_links(result: SearchResult) -> list[Link]:
    """Links inside the islands that reduce: between nodes, or inside of the only node."""
    found: dict[str, Link] = {}
    for name in dict.fromkeys(stage.island for stage in result.estimate.stages):
        island = result.inputs.cluster.island(name)
        link = island.inter_node if island.nodes > 1 else island.intra_node
        found[link_cause(link)] = link
    return list(found.values())[:2]
