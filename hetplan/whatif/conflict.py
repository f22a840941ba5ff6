"""Which demands of a job cannot hold together: a smallest set of them.

`constraints` lists what a job and its cluster demand, one by one. A demand that is taken away is as
if it had never been made: a pin is free, memory is without end, nodes are plenty. What a user could
do about a conflict is another question (`hetplan.whatif.no_plan`).

`find_conflict`: a set of constraints is in conflict where no plan meets them all, whatever else is
free. Sets of one and two are tried, smallest first; beyond that constraints are given up one by one
as long as the rest still has no plan. What is left is in conflict and needs each of its parts (a
solver's own set of sufficient assumptions does not: it may hold what plays no part).

`Feasible` says whether there is any plan at all, by memory, divisibility, pins and the target; no
time is minimised. A 1F1B family has a plan if one row of stages holds all layers: the program over
orders of meshes answers that exactly (`OrderProgram.least` without a limit). Interleaved families
are left to their own solver, which may leave it open; then a plan is assumed (`uncertain`), so that
no conflict is claimed that was not seen. Plans of several pipelines are looked for where a pin
wants them: one of their pipelines alone, with all microbatches, needs the memory that it needs
there, but for microbatches in flight where its share has fewer than it has stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from hetplan.cluster.spec import MAX_DEVICES, Cluster, Island
from hetplan.errors import InputError
from hetplan.job.spec import Forbids, Job
from hetplan.plans.build import check_model
from hetplan.plans.check_job import check_job_against
from hetplan.plans.rules import some
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.one_f_one_b.order_program import OrderProgram, TooLargeError
from hetplan.search.one_f_one_b.order_relaxation import NONE
from hetplan.search.one_f_one_b.solver import OneFOneBSolver
from hetplan.search.result import Question
from hetplan.search.solver import Best, Solver
from hetplan.search.solvers import solvers_of
from hetplan.search.space.allowed import mesh_matches
from hetplan.search.space.family import Family
from hetplan.search.table_maker import TableMaker
from hetplan.units import format_bytes
from hetplan.whatif.ask import libraries_apart, mixing, pins_in_words
from hetplan.whatif.memory_shortage import leanest_first

ENDLESS_BYTES = 1e18
"""Memory of a device where memory is no constraint; far above any model, far below overflow."""

_PLENTY = 256
"""Times as many nodes where the number of devices is no constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One demand, in the user's words, and the question without it."""

    words: str
    without: Callable[[Question], Question]


def constraints(asked: Question) -> tuple[Constraint, ...]:
    """Everything that could stand in the way; what is easiest to give up comes first.

    A conflict keeps what comes late, so that what the user cannot change is named only where it
    must be.
    """
    return (*_of_libraries(asked), *_of_job(asked.job), *_of_cluster(asked.cluster))


def _of_libraries(asked: Question) -> Iterator[Constraint]:
    libraries = libraries_apart(asked)
    if libraries:
        words = f"one library of collectives, of {', '.join(libraries)}"
        yield Constraint(words=words, without=mixing)


def _of_job(job: Job) -> Iterator[Constraint]:
    for name, words in pins_in_words(job):
        yield Constraint(words=f"pin {words}", without=partial(_without_pin, name=name))
    for kind, names in (("islands", job.forbid.islands), ("nodes", job.forbid.nodes)):
        if names:
            words = some(names, 4) if kind == "nodes" else ", ".join(names)
            yield Constraint(
                words=f"forbid {kind}: {words}", without=partial(_without_forbid, kind=kind)
            )
    if job.memory_reserve_fraction > 0:
        yield Constraint(
            words=f"memory_reserve_fraction: {job.memory_reserve_fraction:g}",
            without=lambda asked: asked.with_job(memory_reserve_fraction=0),
        )
    if job.target != "any":
        yield Constraint(
            words=f"target: {job.target}", without=lambda asked: asked.with_job(target="any")
        )
    yield Constraint(
        words=f"global_batch_size: {job.global_batch_size}",
        without=lambda asked: asked.with_job(global_batch_size=_free_batch(asked.job)),
    )


def _without_pin(asked: Question, name: str) -> Question:
    return asked.with_pins(**{name: None})


def _without_forbid(asked: Question, kind: str) -> Question:
    forbid: Forbids = replace(asked.job.forbid, **{kind: ()})
    return asked.with_job(forbid=forbid)


def _free_batch(job: Job) -> int:
    """A batch near the job's that every pinned degree, and many others, divide."""
    pin = job.pin
    fixed = (pin.dp or 1) * (pin.microbatch_size or 1) * (pin.pp or 1)
    unit = math.lcm(fixed, 2 ** max(0, job.global_batch_size.bit_length() - 1))
    return unit * max(1, -(-job.global_batch_size // unit))


def _of_cluster(cluster: Cluster) -> Iterator[Constraint]:
    for island in cluster.islands:
        if island.nodes_out:
            yield Constraint(
                words=f"nodes_out of {island.name}: {len(island.nodes_out)} of {island.nodes}",
                without=partial(_on_islands, {island.name}, lambda each: {"nodes_out": ()}),
            )
    usable = [island for island in cluster.islands if island.usable_nodes]
    shown = " + ".join(f"{island.num_usable_devices} of {island.name}" for island in usable)
    times = min(_PLENTY, MAX_DEVICES // max(1, cluster.num_devices))
    every = {island.name for island in cluster.islands}
    yield Constraint(
        words=f"devices: {shown or 'none are usable'}",
        # New nodes have no names; those that are out stay out.
        without=partial(
            _on_islands, every, lambda each: {"nodes": each.nodes * times, "node_names": ()}
        ),
    )
    for kind in dict.fromkeys(island.device.kind for island in cluster.islands):
        mine = [island for island in cluster.islands if island.device.kind == kind]
        sizes = "/".join(dict.fromkeys(format_bytes(island.memory_bytes) for island in mine))
        names = {island.name for island in mine}
        yield Constraint(
            words=f"memory of {kind}: {sizes} per device",
            without=partial(_on_islands, names, lambda each: {"memory_bytes": ENDLESS_BYTES}),
        )


def _on_islands(
    names: set[str], changes: Callable[[Island], dict[str, Any]], asked: Question
) -> Question:
    """The question with these changes of the islands of these names."""
    islands = tuple(
        replace(island, **changes(island)) if island.name in names else island
        for island in asked.cluster.islands
    )
    return asked.changed(cluster=replace(asked.cluster, islands=islands))


_TRIED_BY_SIZE = 2
"""Largest sets that are all tried; their number grows with the power of their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Constraints that cannot hold together; every proper part of them can."""

    constraints: tuple[Constraint, ...]
    """Empty where there is no plan even without any constraint."""
    smallest: bool
    """No smaller set is in conflict; else only: none of these can be left out."""


def find_conflict(
    asked: Question,
    every: Sequence[Constraint],
    feasible: Callable[[Question], bool],
) -> Conflict:
    """A smallest conflict of a question without a plan."""
    met: list[frozenset[int]] = []
    answers: list[tuple[Question, bool]] = []  # some constraints change nothing

    def holds(kept: Sequence[Constraint]) -> bool:
        """Whether a plan meets these constraints, all others taken away; so it does any of them."""
        names = frozenset(map(id, kept))
        if any(names <= known for known in met):
            return True
        question = asked
        for each in every:
            if id(each) not in names:
                question = each.without(question)
        found = next((known for same, known in answers if same == question), None)
        if found is None:
            found = feasible(question)
            answers.append((question, found))
        if found:
            met.append(names)
        return found

    core = _irreducible(every, holds)
    if not core:
        return Conflict(constraints=(), smallest=True)
    if len(core) > 2:
        # Where these hold, they answer for most of the small sets.
        for one in core:
            holds([each for each in every if each is not one])
    for size in range(1, min(_TRIED_BY_SIZE, len(core) - 1) + 1):
        for kept in combinations(every, size):
            if not holds(kept):
                return Conflict(constraints=kept, smallest=True)
    return Conflict(constraints=core, smallest=len(core) <= _TRIED_BY_SIZE + 1)


def _irreducible(
    every: Sequence[Constraint], holds: Callable[[Sequence[Constraint]], bool]
) -> tuple[Constraint, ...]:
    core = list(every)
    for each in every:
        rest = [other for other in core if other is not each]
        if not holds(rest):
            core = rest
    return tuple(core)


_MAX_TRIED = 50
"""Families whose rough memory fits and whose exact one is asked before the question stays open."""


@dataclass(slots=True)
class Feasible:
    """Says whether a question has a plan."""

    predictor: Predictor
    uncertain: bool = False
    """Whether some answer was assumed: a plan where none was found and none was excluded."""

    def __call__(self, asked: Question) -> bool:
        """Whether a plan exists; False where the question contradicts itself."""
        if check_job_against(asked.job, asked.model, asked.cluster):
            return False
        try:
            check_model(asked.model, asked.job)
            return self._any(asked)
        except InputError:
            # A device kind without a figure for this precision, a model that cannot be cut.
            return False

    def _any(self, asked: Question) -> bool:
        asked = _with_least_batches(asked)
        maker = TableMaker.of(asked, self.predictor)
        families, solvers, seed = maker.families, solvers_of(maker), asked.job.seed
        may = leanest_first(families, maker.with_room())
        if not len(families) and solvers.several is not None:
            may = [solvers.several.index]
        tried = 0
        for at in may:
            if at < len(families) and not _ends_meet(families[at], asked):
                continue
            if tried == _MAX_TRIED:
                self.uncertain = True
                return True
            tried += 1
            if self._has_plan(solvers[at], len(solvers), seed):
                return True
        return False

    def _has_plan(self, solver: Solver, count: int, seed: int) -> bool:
        if isinstance(solver, OneFOneBSolver):
            program = OrderProgram(solver.space)
            try:
                if program.has_orders:
                    return program.least(NONE, keep=False) < NONE
            except TooLargeError:
                pass
            self.uncertain = True
            return True
        best = Best(bounds=[math.inf] * count, seed=seed)
        best.bounds[solver.index] = solver.order_free.bound_seconds
        solver.improve(best)
        if best.chosen is not None or not isinstance(solver, InterleavedSolver):
            return best.chosen is not None
        solver.prove(best)
        if best.chosen is None and best.bounds[solver.index] < math.inf:
            self.uncertain = True
            return True
        return best.chosen is not None


def _with_least_batches(asked: Question) -> Question:
    """The question with microbatches of one sequence where that takes away no answer: a fifth of
    the families are left.

    Claim: where all stages have one shape, a plan with m microbatches of b sequences fits only if
    the same one with b m microbatches of one sequence does. Proof: a stage that keeps the
    activations of min(W, m) microbatches, W by its schedule and place, keeps those of
    min(W, b m) <= b min(W, m) sequences then; buffers grow with b, states do not change, and what m
    has to be a multiple of, or no less than, b m is too. Shapes that differ are left alone: equal
    dp x b may need some b above 1.
    """
    trainer, pin = target(asked.job.target), asked.job.pin
    if trainer.stages_differ or trainer.several_pipelines or pin.microbatch_size is not None:
        return asked
    return asked.with_pins(microbatch_size=1)


def _ends_meet(family: Family, asked: Question) -> bool:
    """Whether pins of the first stage, the last stage and their number leave meshes for them."""
    pin, cluster = asked.job.pin, asked.cluster
    first = [mesh_matches(mesh, cluster, pin.embedding_on) for mesh in family.meshes]
    last = [mesh_matches(mesh, cluster, pin.head_on) for mesh in family.meshes]
    if pin.pp == 1:
        return any(a and b for a, b in zip(first, last, strict=True))
    return any(first) and any(last)
