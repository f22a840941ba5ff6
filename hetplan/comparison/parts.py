"""Find the part of the step that is off, by how much, and what that usually means.

Timers: every timer of a trainer counts some of the plan's components (the table of
docs/compare.md). Its figure is of a whole step, in the median over the steps that count; minima and
maxima over ranks are compared with the least and the most over the plan's stages.

Parts: they add up to the step, by the same sums of timers on both sides. With F, B the forward and
backward passes of the slowest rank, S the whole schedule (Megatron-LM's forward-backward), R the
reduction after it, E the sum of a tied embedding's gradients, O the end:

    waits = S - F - B, less R and E where S holds them
    rest  = step - all of the above: barriers, waits for other stages, data, logging

Where S is missing, the waits are what the send and receive timers count, or stay in the rest, and
the part's name tells.

Culprit: the part that is off most in seconds, once it is off by more than the run's own steps
differ and by more than 1 % of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.spec import Link
from hetplan.comparison.steps import StepSpread
from hetplan.cost.estimate_values import Component, Estimate, StageEstimate
from hetplan.predict.predictor import link_cause
from hetplan.search.descriptions import devices_in_use
from hetplan.search.result import SearchResult
from hetplan.trainers.megatron import log as megatron_log
from hetplan.trainers.training_log import IN_PASSES, Quantity, TimerRanks, meanings


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerRow:
    """One of the trainer's timers beside what the plan predicts for the same ranks."""

    timer: str
    quantity: str
    """What it counts, a `Quantity` value; empty where the plan predicts nothing
    of the kind."""
    ranks: str
    """Whose times: all ranks' least and most, or one rank's."""
    measured_least_seconds: float
    """Medians over the steps that count."""
    measured_most_seconds: float
    predicted_least_seconds: float | None
    predicted_most_seconds: float | None
    note: str
    """What the timer does not tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part of the step; parts add up to the step on both sides."""

    part: str
    components: tuple[str, ...]
    """Components of the estimate that it holds (`Component` values)."""
    predicted_seconds: float
    measured_seconds: float
    note: str = ""

    @property
    def difference_seconds(self) -> float:
        """Measured less predicted."""
        return self.measured_seconds - self.predicted_seconds

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The part that is off most, in seconds of the step."""

    part: str
    difference_seconds: float
    """Measured less predicted."""
    meaning: str
    """What it usually is."""
    measure: str
    """Which measurement to repeat."""


WAITS = (Component.BUBBLE, Component.PIPELINE)
REDUCTION = (Component.DATA_PARALLEL,)
UPDATE = (Component.OPTIMIZER, Component.OFFLOAD)
END = (Component.NORM, *UPDATE, Component.GATHERING)
OUTSIDE_PASSES = (
    *WAITS,
    *REDUCTION,
    Component.EMBEDDING,
    *END,
    Component.DATA_LOADING,
    Component.OTHER_STAGES,
    Component.STRAGGLERS,
)
"""Every other component is compute or communication inside the passes."""
PASSES = tuple(component for component in Component if component not in OUTSIDE_PASSES)

COMPONENTS: tuple[tuple[Quantity, tuple[Component, ...]], ...] = (
    (Quantity.FORWARD, PASSES),
    (Quantity.BACKWARD, PASSES),
    (Quantity.PASSES, PASSES),
    (Quantity.PASSES_AND_WAITS, (*PASSES, *WAITS)),
    (Quantity.SCHEDULE, (*PASSES, *WAITS, *REDUCTION, Component.EMBEDDING)),
    (Quantity.WAITS, WAITS),
    (Quantity.REDUCTION, REDUCTION),
    (Quantity.EMBEDDING, (Component.EMBEDDING,)),
    (Quantity.WAITS_TO_THE_END, (*WAITS, Component.OTHER_STAGES, Component.EMBEDDING)),
    (Quantity.END, END),
    (Quantity.NORM, (Component.NORM,)),
    (Quantity.UPDATE, UPDATE),
    (Quantity.GATHERING, (Component.GATHERING,)),
    (Quantity.DATA, (Component.DATA_LOADING,)),
    (Quantity.TENSOR_PARALLEL, (Component.TENSOR_PARALLEL,)),
)


_NATIVE = meanings(
    # hetplan's own trainer, hetplan/runtime/measured.py.
    ("busy", Quantity.PASSES, IN_PASSES),
    ("wait", Quantity.WAITS, "until the rank leaves the pipeline"),
    ("reduction", Quantity.REDUCTION, "waiting for the others included"),
    ("optimizer_seconds", Quantity.END, "norm, update and gathering"),
    ("tensor_parallel", Quantity.TENSOR_PARALLEL, "inside busy; accelerators do not tell it"),
)  # fmt: skip

MEANINGS = (*megatron_log.TIMERS, *_NATIVE)
MEANING = {meaning.timer: meaning for meaning in MEANINGS}


def components_of(quantity: Quantity) -> tuple[Component, ...]:
    """The components that the quantity holds."""
    return dict(COMPONENTS)[quantity]


def predicted(
    estimate: Estimate, quantity: Quantity, ranks: TimerRanks
) -> tuple[float, float] | None:
    """Least and most seconds over the stages; None where the estimate has no components."""
    stages = estimate.stages
    if not all(stage.components for stage in stages):
        return None
    if ranks is TimerRanks.FIRST:
        stages = stages[:1]
    elif ranks is TimerRanks.LAST:
        stages = stages[-1:]
    seconds = list(_of_stages(stages, quantity))
    return min(seconds), max(seconds)


def _of_stages(stages: tuple[StageEstimate, ...], quantity: Quantity) -> Iterator[float]:
    """Seconds per stage and step."""
    for stage in stages:
        whole = of_components(stage, quantity)
        if quantity in (Quantity.FORWARD, Quantity.BACKWARD):
            both = stage.forward_seconds + stage.backward_seconds
            one = stage.forward_seconds if quantity is Quantity.FORWARD else stage.backward_seconds
            # The split between the two passes is of one microbatch; their sum is the step's.
            whole = whole * one / both if both else 0.0
        yield whole


def of_components(stage: StageEstimate, quantity: Quantity) -> float:
    """Sum of the stage's components that the quantity holds."""
    held = set(components_of(quantity))
    return sum((entry.seconds for entry in stage.components if entry.component in held), 0.0)


_INSIDE_SCHEDULE = "all-grads-sync"
"""Megatron-core reduces inside forward-backward where it has this timer
(megatron/core/distributed/finalize_model_grads.py); before, the reduction came after it."""

REST = "rest of the step"
_ROUNDING = 1e-9

Seconds = Mapping[Quantity, float]
"""Seconds of the rank that counts, per quantity that the log tells."""


def parts_of(
    timers: Sequence[TimerRow], predicted: Seconds, measured_step: float, predicted_step: float
) -> tuple[PartRow, ...]:
    """The parts that these timers tell, and the rest; nothing where they tell none.

    `predicted` has every quantity of the timers, on the side that `counted_side` says.
    """
    known = [row for row in timers if row.quantity and Quantity(row.quantity) in predicted]
    measured: dict[Quantity, float] = {}
    for row in known:
        quantity = Quantity(row.quantity)
        # Several timers of one quantity are parts of it; the prediction is of all of them.
        counted = counted_side(row.measured_least_seconds, row.measured_most_seconds, quantity)
        measured[quantity] = measured.get(quantity, 0.0) + counted
    waits = (Quantity.WAITS, Quantity.EMBEDDING)
    if all(quantity in measured for quantity in waits) and Quantity.WAITS_TO_THE_END in predicted:
        # The last stage sums a tied embedding with the first and waits for it in that timer.
        measured[Quantity.WAITS_TO_THE_END] = sum(measured[quantity] for quantity in waits)
    inside = any(row.timer == _INSIDE_SCHEDULE for row in known)
    mine = _rows(measured, inside=inside)
    if not mine:
        return ()
    theirs = {
        name: seconds
        for name, _, seconds, _ in _rows(
            {quantity: predicted[quantity] for quantity in measured}, inside=True
        )
    }
    rows = [
        PartRow(
            part=name,
            components=tuple(component.value for component in components),
            predicted_seconds=theirs.get(name, 0.0),
            measured_seconds=seconds,
            note=note,
        )
        for name, components, seconds, note in mine
    ]
    told = {component for row in rows for component in row.components}
    rows.append(
        PartRow(
            part=REST,
            components=tuple(c.value for c in Component if c.value not in told),
            predicted_seconds=_left(predicted_step, [row.predicted_seconds for row in rows]),
            measured_seconds=_left(measured_step, [row.measured_seconds for row in rows]),
            note="what no timer of the log counts",
        )
    )
    return tuple(rows)


def counted_side(least: float, most: float, quantity: Quantity) -> float:
    """Which end of a timer's span makes up the step: the slowest rank's, and of waits the least,
    because the rank with the longest passes waits least.
    """
    return least if quantity is Quantity.WAITS else most


def _left(step: float, parts: Sequence[float]) -> float:
    """What the parts leave of the step; nothing where only rounding is left."""
    left = step - sum(parts)
    return left if abs(left) > _ROUNDING * step else 0.0


_Row = tuple[str, tuple[Component, ...], float, str]


def _rows(seconds: Seconds, *, inside: bool) -> list[_Row]:
    rows: list[_Row] = []

    def add(quantity: Quantity, value: float, note: str = "") -> None:
        rows.append((quantity.value, components_of(quantity), max(value, 0.0), note))

    both = Quantity.FORWARD in seconds and Quantity.BACKWARD in seconds
    passes = seconds.get(Quantity.PASSES)
    if both:
        passes = seconds[Quantity.FORWARD] + seconds[Quantity.BACKWARD]
        add(Quantity.FORWARD, seconds[Quantity.FORWARD], "tp, cp and ep communication inside")
        add(Quantity.BACKWARD, seconds[Quantity.BACKWARD], "recomputation and the same inside")
    elif passes is not None:
        add(Quantity.PASSES, passes, "tp, cp and ep communication inside")
    after = [q for q in (Quantity.REDUCTION, Quantity.EMBEDDING) if q in seconds]
    reduced = sum(seconds[quantity] for quantity in after)
    schedule = seconds.get(Quantity.SCHEDULE)
    if schedule is not None:
        # Without timers of the reduction, what the schedule holds of it cannot be taken out.
        name, held = _schedule_name(passes is None, told=bool(after))
        left = schedule - (reduced if inside else 0.0) - (passes or 0.0)
        note = "bubble and transfers are not told apart"
        rows.append((name, held, max(left, 0.0), note))
    elif Quantity.WAITS_TO_THE_END in seconds:
        note = "bubble, transfers and the wait for the first stage are not told apart"
        add(Quantity.WAITS_TO_THE_END, seconds[Quantity.WAITS_TO_THE_END], note)
        after = [q for q in after if q is not Quantity.EMBEDDING]
    elif Quantity.WAITS in seconds:
        add(Quantity.WAITS, seconds[Quantity.WAITS], "bubble and transfers are not told apart")
    for quantity in after:
        add(quantity, seconds[quantity], "what nothing hides")
    return rows + _end(seconds)


def _end(seconds: Seconds) -> list[_Row]:
    """The end of the step as finely as the timers tell it."""
    parts = [q for q in (Quantity.NORM, Quantity.GATHERING) if q in seconds]
    rows = [(q.value, components_of(q), seconds[q], "") for q in parts]
    whole = seconds.get(Quantity.END)
    if whole is None:
        if Quantity.UPDATE in seconds:
            update = seconds[Quantity.UPDATE]
            rows.append((Quantity.UPDATE.value, components_of(Quantity.UPDATE), update, ""))
        return rows
    held = {component for quantity in parts for component in components_of(quantity)}
    left = tuple(c for c in components_of(Quantity.END) if c not in held)
    name = Quantity.END.value
    if parts:
        name = " and ".join(c.value for c in left if c is not Component.OFFLOAD)
    inner = sum(seconds[quantity] for quantity in parts)
    rows.append(
        (name, left, max(whole - inner, 0.0), "what is left of the whole end" * bool(parts))
    )
    return rows


def _schedule_name(whole: bool, *, told: bool) -> tuple[str, tuple[Component, ...]]:
    """Name and components of what is left of the schedule."""
    if told:
        quantity = Quantity.PASSES_AND_WAITS if whole else Quantity.WAITS
        return quantity.value, components_of(quantity)
    if whole:
        return Quantity.SCHEDULE.value, components_of(Quantity.SCHEDULE)
    reduced = (*components_of(Quantity.REDUCTION), *components_of(Quantity.EMBEDDING))
    return "waits and reduction", (*components_of(Quantity.WAITS), *reduced)


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
        count = devices_in_use(result.plan)
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
    links: dict[str, Link] = {}
    names = [stage.island for stage in result.estimate.stages]
    for left, right in pairwise(names):
        link = cluster.island(left).inter_node if left == right else None
        link = link or cluster.link_between(left, right)
        links[link_cause(link)] = link
    return sorted(links.values(), key=lambda link: link.goodput_bytes_per_second)[:2]


def _reduction_links(result: SearchResult) -> list[Link]:
    """Links inside the islands that reduce: between nodes, or inside of the only node."""
    links: dict[str, Link] = {}
    for name in dict.fromkeys(stage.island for stage in result.estimate.stages):
        island = result.inputs.cluster.island(name)
        link = island.inter_node if island.nodes > 1 else island.intra_node
        links[link_cause(link)] = link
    return list(links.values())[:2]
