"""Bound of 1F1B families: no plan has a shorter step than this says.

Is any plan of a family below a target? The certified walk over X.

S(X) is the least Sigma + after_0 of all pipelines whose X is at most X (`order_program`). A
pipeline below an aim A has Sigma + after_0 + X < A. So where S(U) = v, no pipeline with X between A
- v and U is below A; walking U down to A - v, again and again, ends where nothing is left below A
(A is a bound) or stands still: then the pipeline that has v is, in the bound, below A, and A comes
down to it. Both ends of the walk come from the order-free S, which is cheap. Where the aim has to
come down, it starts at the least of a few samples, so that the walk is short.

A program is the larger the larger U and the higher the S that it looks for. One that is too large
is asked for less: whether S(U) is below A - F for an F little below U. Where it is not, no pipeline
with X between F and U is below A, and F is the next U: small strides, each of a small program.

The bound is valid for whatever aim, samples and strides; they decide only how long the walk takes.

Slots hold no more than a step below the target allows. What a slot does after its last pass, as
sums of gradients between regions or of experts, can take a good part of the step. The programs over
orders add that of the first slot; a second one, where ends are long and tables small, that of the
latest slot (`order_numbers`). Whatever else happens, a slot has m passes of each kind and then its
own end of the step:

    m (c + n a) + after(n) <= T

so it holds no more units than that. Where a slot q with a long end is in the pipeline, slots in
front of it, which have W microbatches in flight, have begun their last forward pass before q ends,
and slots behind it have ended before; so for every slot

    (m - W) (c + n a + i + g) + after(q) <= T

Pipelines with and without such slots are proven apart (`apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.one_f_one_b.order_numbers import Ending
from hetplan.search.one_f_one_b.order_program import Order, OrderProgram, TooLargeError
from hetplan.search.one_f_one_b.order_relaxation import NONE
from hetplan.search.space.stage_table import (
    FIRST,
    LAST,
    MIDDLE,
    RENDEZVOUS_EXTRA,
    StageTable,
    backward_wires,
    forward_wires,
)

RESOLUTION = 1e-4
"""Part of a step by which a bound below the target may miss the least of the programs."""

_EDGE = 1e-3
"""Part of X to which the order-free ends are found: they only make programs smaller."""

_SAMPLES = 6
"""Programs that look for the least of the bound before the walk goes below the target."""

_FAR = 1.2
"""A walk whose ends are further apart than this looks for a nearer aim first."""

_STRIDE = 1.03
"""From one X to the next while no pipeline has been met."""

_CHEAP = 2e6
"""Operations of a program, about 20 ms, after which the next stride is longer: so far up the next
one takes little more. A family that has no pipeline below its target is closed by few of them."""

_TRIED = 5e6
"""Operations after which a program that goes down to the lower end is too large."""

_NARROW, _WIDE = 1.01, 1.3
"""Least and most by which a stride brings X down."""

_SMALL, _LARGE = 5e7, 4e8
"""Operations of a program after which the next stride is wider, or narrower."""

_NO_PLAN_YET = 1e24
"""A target above any step: before the first plan is known."""

_JUST_BELOW = 1.0 - 1e-11
"""Factor by which a value is passed, a little more than rounding moves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A pipeline that a program found, and what the bound says of it."""

    order: Order
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known of all plans of a table."""

    bound_seconds: float
    """No plan is below; `NONE` where there is no plan at all."""
    proven: bool
    """Whether the bound has reached the target."""
    finished: bool
    """Whether the walk came to its end; it can be resumed where not."""
    met: tuple[Met, ...]
    """Pipelines below the target in the bound, least first."""
    programs: int
    operations: int
    """Of the programs so far; they decide when a budget is spent."""


@dataclass(slots=True)
class Walk:
    """A proof under way; `run` goes on where it stopped.

    check is called every now and then and may raise; the walk can be resumed then too. on_met is
    told of every pipeline below the target and returns the target from then on: lower where a
    replay has found a better plan.
    """

    program: OrderProgram
    target: float
    check: Callable[[], None] | None = None
    on_met: Callable[[Met], float] | None = None
    most: float = NONE
    """Operations at which a single program is given up, and the run with it."""
    aim: float = field(init=False)
    """No pipeline whose X is above `upper` is below this."""
    upper: float = field(init=False)
    lower: float = field(init=False, default=0.0)
    """No pipeline has a smaller X."""
    programs: int = field(init=False, default=0)
    finished: bool = field(init=False, default=False)
    _stride: float = field(init=False, default=NONE)
    """X over the lowest one that a program is asked about."""
    _least: float = field(init=False, default=0.0)
    """Least Sigma + after_0 with X at most `upper`, as far as it is known."""
    _sampled: bool = field(init=False, default=False)
    _stop: float = field(init=False, default=NONE)
    _met: dict[Order, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.aim = self.upper = self.target

    def run(self, budget: float = NONE) -> Proof:
        """Go on until the end, or until `budget` operations more are spent."""
        stop = self.program.operations + budget
        try:
            if not self.finished and self.programs == 0:
                self._ends()
            while not self.finished and self.program.operations <= stop:
                if not self.program.has_orders:
                    break
                self._step()
        except TooLargeError:
            pass
        return self.proof()

    def _check(self) -> None:
        if self.check is not None:
            self.check()
        if self.program.operations > self._stop:
            raise TooLargeError

    def proof(self) -> Proof:
        """What is known by now."""
        # Whatever is left has X between the two ends.
        bound = self.aim if self.finished else min(self.aim, self.lower + self._least)
        ordered = sorted(self._met.items(), key=lambda item: item[1])
        return Proof(
            bound_seconds=bound,
            proven=self.finished and bound >= self.target,
            finished=self.finished,
            met=tuple(Met(order=order, bound_seconds=seconds) for order, seconds in ordered),
            programs=self.programs,
            operations=self.program.operations,
        )

    def _ends(self) -> None:
        """Both ends of X by the order-free program."""
        free = self.program.free(NONE)
        self._least = free
        if free >= NONE:
            self.aim, self.finished = NONE, True
            return
        if free >= self.target:
            self.finished = True
            return
        self.lower = self._least_x()
        self._come_down()
        if not self.program.has_orders:
            return
        if not self.finished and self.target >= _NO_PLAN_YET and self._is_empty():
            self.aim, self.finished = NONE, True
        if not self.finished and self.lower > 0.0 and self.upper > _FAR * self.lower:
            if self.target < _NO_PLAN_YET:
                self._stride = _STRIDE
                return
            # Where there is nothing to come down from, the first aim is found from below.
            self._climb()
            self._come_down()

    def _is_empty(self) -> bool:
        """Whether no pipeline exists at all: the order-free program does not see every pin."""
        self._stop = self.program.operations + self.most
        return self.program.least(NONE, keep=False, check=self._check) >= NONE

    def _come_down(self) -> None:
        """Bring the upper end down as far as the order-free program can."""
        while True:
            free = self._least = self.program.free(min(self.upper, self.aim))
            if self.aim - free <= self.lower:
                self.finished = True
                return
            if self.aim - free > self.upper * (1.0 - _EDGE):
                return
            self.upper = self.aim - free

    def _climb(self) -> None:
        """Ask at growing X until a pipeline is met; it is a first aim."""
        at, stride = self.lower, _STRIDE
        while at * stride < self.upper:
            at *= stride
            before = self.program.operations
            value, reached = self._ask(at)
            cheap = self.program.operations - before < _CHEAP
            stride = stride**2 if cheap else _STRIDE
            if value < NONE:
                self._sampled = True
                self._lower_aim(value + reached)
                self._sample(reached)
                return

    def _lower_aim(self, seconds: float) -> None:
        if seconds < self.aim:
            self.aim = seconds - RESOLUTION * min(seconds, self.target)

    def _least_x(self) -> float:
        """An X below which nothing fits, order-free."""
        if self.program.free(0.0) < NONE:
            return 0.0  # a single microbatch
        high = 1.0
        while self.program.free(high) >= NONE:
            high *= 4.0
        low = 0.0
        while high - low > _EDGE * high:
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.program.free(middle) >= NONE else (low, middle)
        return low

    def _ask(self, limit: float, floor: float | None = None) -> tuple[float, float]:
        """(S, X of the pipeline that has it) at a limit; S is `NONE` where nothing is below.

        Only S below A - floor are looked for, the lower end where it is left out.
        """
        if self.check is not None:
            self.check()
        floor = self.lower if floor is None else floor
        self._stop = self.program.operations + self.most
        if self._stride == NONE and self.target < _NO_PLAN_YET:
            self._stop = self.program.operations + min(self.most, _TRIED)
        value = self.program.least(limit, self.aim - floor, check=self._check)
        self.programs += 1
        order = self.program.order()
        if order is None:
            return NONE, 0.0
        reached = min(limit, self.program.limit_of_order())
        if value + reached < self.target:
            known = order in self._met
            self._met[order] = min(self._met.get(order, NONE), value + reached)
            if self.on_met is not None and not known:
                self.lower_target(self.on_met(Met(order=order, bound_seconds=value + reached)))
        return value, reached

    def lower_target(self, target: float) -> None:
        """Plans below a lower target than before are looked for from now on."""
        self.target = min(self.target, target)
        self.aim = min(self.aim, self.target)

    def _step(self) -> None:
        limit, before = self.upper, self.program.operations
        floor = max(self.lower, limit / self._stride)
        try:
            value, reached = self._ask(limit, floor)
        except TooLargeError:
            if self._stride < NONE or self.program.operations - before > self.most:
                raise
            self._stride = _STRIDE
            return
        if value >= NONE:
            # What is left has X up to the floor.
            self._least = max(self._least, self.aim - floor)
            self.upper = floor
            self.finished = floor <= self.lower
            self._pace(self.program.operations - before)
            return
        self._least = value
        if value + reached < self.aim and not self._sampled:
            self._sampled = True
            self._sample(reached)
        # Every pipeline with X from `reached` to `upper` takes at least value + reached.
        self._lower_aim(value + reached)
        self.upper = min(reached * _JUST_BELOW, max(self.aim - value, 0.0))
        if self.upper < self.lower:
            self.finished = True

    def _pace(self, operations: int) -> None:
        """Wider strides after small programs, narrower ones after large programs."""
        if self._stride == NONE:
            return
        if operations < _SMALL:
            self._stride = min(_WIDE, self._stride**2)
        elif operations > _LARGE:
            self._stride = max(_NARROW, self._stride**0.5)

    def _sample(self, reached: float) -> None:
        """Bring the aim down to the least of the bound, if only roughly."""
        low = self.lower
        at = (low + reached) / 2.0
        for _ in range(_SAMPLES):
            value, x = self._ask(at)
            if value >= NONE:
                low, at = at, (at + reached) / 2.0
                continue
            self._lower_aim(value + x)
            at = (low + x) / 2.0


def prove(
    program: OrderProgram,
    target: float,
    budget: float = NONE,
    *,
    check: Callable[[], None] | None = None,
    on_met: Callable[[Met], float] | None = None,
) -> Proof:
    """Whether any plan of the program's space can be below `target`, or the best bound and what it
    meets; see `Walk`. It ends after `budget` operations, within a program too.
    """
    return Walk(program, target, check, on_met, most=budget).run(budget)


def prove_by_any(
    programs: Sequence[OrderProgram],
    target: float,
    budget: float = NONE,
    *,
    check: Callable[[], None] | None = None,
    on_met: Callable[[Met], float] | None = None,
) -> Proof:
    """As `prove`, by the highest of several bounds of the same pipelines; the others are not asked
    once the target is reached.
    """
    found: list[Proof] = []
    for program in programs:
        found.append(prove(program, target, budget, check=check, on_met=on_met))
        if found[-1].proven:
            break
    return replace(
        max(found, key=lambda each: each.bound_seconds),
        finished=all(each.finished for each in found),
        programs=sum(each.programs for each in found),
        operations=sum(each.operations for each in found),
    )


_LONG = 0.05
"""Part of the step from which an end of it is long."""

_MOST_LEVELS, _FEW_LEVELS = 32, 8
"""Of lateness, which is rounded down to one of them. In two families of experts on 1,024 devices 8
give 27 and 37 of the 42 and 43 ms by which 32 raise a bound of 3 s (measured)."""

_MOST_ENTRIES = 20_000_000
"""Of tables with levels of lateness, at 8 bytes each."""


def apart(table: StageTable, seconds: float) -> tuple[tuple[tuple[OrderProgram, ...], Ints], ...]:
    """(programs of the same pipelines, their meshes in the table) that together have all pipelines
    of such a step: those without long ends, and the others, where ends of all slots are counted by
    the second program.
    """
    ends = table.after.min(axis=0)
    ends[:, 0] = ends[:, 1]
    # Growing with the units, so that a slot is long from some number of them on.
    ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    held, meshes = _held(table, np.arange(len(ends)), seconds)
    ends, program = ends[meshes], OrderProgram(held)
    levels = program.levels_within(_MOST_ENTRIES)
    long = ends > _LONG * seconds
    if levels < _FEW_LEVELS:
        long[:] = long[:, [1]]  # told apart by meshes alone
    long[:, 0] = False
    if not (long & _can(held)).any() or table.most_extra_depth:
        return (((program,), meshes),)
    few = np.count_nonzero(~long[:, 1:], axis=1)
    short = held._replace(most_layers=np.minimum(held.most_layers, few[:, None]))
    found: list[tuple[tuple[OrderProgram, ...], Ints]] = []
    for part, every_slot in ((short, False), (_beside(held, seconds, ends[long].min()), True)):
        part, some = _held(part, np.arange(len(few)), seconds)
        if not _can(part)[:, 1:].any():
            continue
        programs = [OrderProgram(part)]
        if every_slot and levels >= _FEW_LEVELS:
            ending = _ending(part, ends[some], min(levels, _MOST_LEVELS))
            programs.append(OrderProgram(part, ending=ending))
        found.append((tuple(programs), meshes[some]))
    return tuple(found)


def _can(table: StageTable) -> npt.NDArray[np.bool_]:
    """[M, L + 1] whether a slot can hold so many units."""
    units = np.arange(table.num_layers + 1)
    can: npt.NDArray[np.bool_] = units <= table.most_layers.max(axis=(0, 1, 3))[:, None]
    return can


def _ending(table: StageTable, ends: Floats, levels: int) -> Ending:
    """Ends of all slots; edges up to the longest one that a slot can have."""
    longest = float(ends[_can(table)].max())
    return Ending(np.ascontiguousarray(ends), np.linspace(0.0, longest, levels))


def together(table: StageTable, seconds: float) -> tuple[OrderProgram, Ints]:
    """As `apart`, but one program of all pipelines: half the work, and a lower bound."""
    held, meshes = _held(table, np.arange(len(table.max_stages)), seconds)
    return OrderProgram(held), meshes


def _held(table: StageTable, meshes: Ints, seconds: float) -> tuple[StageTable, Ints]:
    """The space within the step, of those of its meshes of which a slot can hold a unit."""
    limited = within(table, seconds)
    some = np.flatnonzero(limited.most_layers.max(axis=(0, 1, 3)) > 0)
    if 0 < len(some) < len(meshes):
        return limited.of_meshes(some), meshes[some]
    return limited, meshes


def _beside(table: StageTable, seconds: float, end: float) -> StageTable:
    """For pipelines that have a mesh whose end of the step is at least this long."""
    flights = np.arange(table.most_layers.shape[3])
    left = np.maximum(table.num_microbatches - flights, 0)
    busy = _busy(table)
    # [V, 4, M, W + 1]: units for which all but the last passes leave time for that end.
    most = np.zeros(table.most_layers.shape, dtype=np.int64)
    for units in range(1, table.num_layers + 1):
        most += left * busy[..., units, None] + end <= seconds * (1.0 + 1e-9)
    return table._replace(most_layers=np.minimum(table.most_layers, most))


def within(table: StageTable, seconds: float) -> StageTable:
    """The same space for pipelines with a step of at most `seconds`, where that limits a slot."""
    whole = table.num_microbatches * _busy(table) + table.after
    allowed = whole <= seconds * (1.0 + 1e-9)
    allowed[..., 0] = True
    most = table.num_layers - np.argmax(allowed[..., ::-1], axis=-1)
    limited = np.minimum(table.most_layers, most[..., None])
    if np.array_equal(limited, table.most_layers):
        return table
    return table._replace(most_layers=limited)


def _busy(table: StageTable) -> Floats:
    """[V, 4, M, L + 1] least seconds that a microbatch takes of a slot with so many units."""
    passes = (table.forward + table.backward)[:, None, :, None]
    ends = (table.extra_forward + table.extra_backward).swapaxes(0, 1) + _waits(table)
    busy: Floats = ends[..., None] + passes * np.arange(table.num_layers + 1)
    return busy


def _waits(table: StageTable) -> Floats:
    """[4, M] least serial seconds of the transfers of a microbatch that a slot receives."""
    found = np.zeros(table.after.shape[:2])
    if not table.rendezvous:
        return found
    links, nodes = table.links, table.node_links
    posted, node_posted = links[RENDEZVOUS_EXTRA], nodes[RENDEZVOUS_EXTRA]
    apart = (table.island_mask[:, None] & table.island_mask[None, :]) == 0
    inside = table.max_stages > 1
    for wire, node, axis, roles in (
        (forward_wires(links), forward_wires(nodes), 0, (MIDDLE, LAST)),
        (backward_wires(links), backward_wires(nodes), 1, (MIDDLE, FIRST)),
    ):
        least = np.where(apart, wire + posted, np.inf).min(axis=axis)
        own = np.diagonal(wire + posted)
        own = np.minimum(own, node + node_posted)
        least = np.minimum(least, np.where(inside, own, np.inf))
        found[list(roles)] += np.where(np.isfinite(least), least, 0.0)
    return found
