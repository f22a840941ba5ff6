"""The fastest plan that a target can run, where it cannot run the plan at hand.

The same model, cluster and job are searched for the target's own limits. What the trainer's module
still refuses of the new plan is pinned away: a fault that says `pin NAME: VALUE` names the pin. So
the answer is the fastest plan under those pins, not of all that the target can run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.errors import Fault, HetplanError, InfeasibleError
from hetplan.job.spec import Job, Pins, TrainerOptions
from hetplan.plans.check_job import check_job_against
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.result import Inputs, SearchResult
from hetplan.search.solver import Progress
from hetplan.trainers import Trainer
from hetplan.trainers.emission import plan_faults, refusals
from hetplan.whatif.against import choices
from hetplan.whatif.ask import searched

_MAX_ROUNDS = 8
"""Searches in a row, each with the pins that faults of the one before name."""
_PIN = re.compile(r"\bpin ([a-z_]+): ([a-z0-9-]+)", re.ASCII)
_OPTION = "inputs.job.trainer."
_PINS = {field.name for field in fields(Pins)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A plan that the target can run, and what had to change for it."""

    result: SearchResult
    changes: tuple[str, ...]
    """What was changed in the job, a line each."""
    refused_seconds: float
    """Step of the refused plan by the same predictor, for the target that it was made for."""


def nearest_plan(
    result: SearchResult,
    trainer: Trainer,
    options: EmissionOptions,
    predictor: Predictor,
    *,
    digest: str = "",
    progress: Callable[[Progress], None] | None = None,
) -> Nearest:
    """The fastest plan that the trainer can run, by search; `digest`: sha256 of the predictor.

    InfeasibleError where none was found, with the reasons; LimitError where the job's
    time limit came first.
    """
    inputs = result.inputs
    job, changes = _job_for(result, trainer)
    searching = _NearestSearch(result, trainer, options, predictor, digest, progress)
    nearest, pins = searching.within(job)
    return Nearest(
        result=nearest,
        changes=(*changes, *pins),
        refused_seconds=_priced(result, inputs.job, predictor),
    )


def plan_differences(before: Plan, after: Plan, cluster: Cluster) -> tuple[str, ...]:
    """How the plans differ, a line for each thing that does."""
    return tuple(
        f"{each.name}: {each.found} -> {each.other}" for each in choices(before, after, cluster)
    )


@dataclass(frozen=True, slots=True)
class _NearestSearch:
    """What stays the same over all searches."""

    result: SearchResult
    trainer: Trainer
    options: EmissionOptions
    predictor: Predictor
    digest: str
    progress: Callable[[Progress], None] | None

    def within(self, job: Job) -> tuple[SearchResult, tuple[str, ...]]:
        """(a plan that the trainer can run, pins that it took)."""
        inputs = self.result.inputs
        changes: list[str] = []
        for _ in range(_MAX_ROUNDS):
            found = self._searched(job)
            faults = self._refused(found)
            if not faults:
                return found, tuple(changes)
            if found.certificate is not None and found.certificate.status == "interrupted":
                raise KeyboardInterrupt
            narrower, more = _narrowed(job, faults)
            if not more:
                message = f"{self._none()}; the plan that was found cannot be: "
                raise InfeasibleError([f"{message}{fault}" for fault in faults])
            job = narrower
            changes += more
            against = check_job_against(job, inputs.model, inputs.cluster)
            if against:
                raise InfeasibleError([f"{self._none()}: {fault}" for fault in against])
        raise InfeasibleError([f"{self._none()} in {_MAX_ROUNDS} searches"])

    def _refused(self, result: SearchResult) -> tuple[Fault, ...]:
        return plan_faults(refusals(result, self.trainer, self.options))

    def _searched(self, job: Job) -> SearchResult:
        inputs = self.result.inputs
        digests = tuple(each for each in inputs.sha256 if each[0] in ("model", "cluster"))
        digests += (("predictor", self.digest),) if self.digest else ()
        asked = Inputs(model=inputs.model, cluster=inputs.cluster, job=job, sha256=digests)
        return searched(asked, self.predictor, progress=self.progress)

    def _none(self) -> str:
        return f"no plan was found that target {self.trainer.name} can run"


def _job_for(result: SearchResult, trainer: Trainer) -> tuple[Job, tuple[str, ...]]:
    """The job for the trainer's target, without settings that only other targets have."""
    inputs, changes = result.inputs, []
    job = replace(inputs.job, target=trainer.plan_target)
    for fault in check_job_against(job, inputs.model, inputs.cluster):
        part, _, name = fault.field.partition(".")
        if part == "pin" and name in _PINS and getattr(job.pin, name) is not None:
            job = replace(job, pin=replace(job.pin, **{name: None}))
            changes.append(f"without pin {name}: {fault.message}")
        elif part == "trainer" and _is_set(job.trainer, name):
            job = replace(job, trainer=replace(job.trainer, **{name: None}))
            changes.append(f"without trainer.{name}: {fault.message}")
    left = check_job_against(job, inputs.model, inputs.cluster)
    if left:
        raise InfeasibleError(
            [f"no plan of this job for target {trainer.name}: {fault}" for fault in left]
        )
    return job, tuple(changes)


def _narrowed(job: Job, faults: Sequence[Fault]) -> tuple[Job, tuple[str, ...]]:
    """The job with what the faults ask for and it does not have yet, and that in words."""
    changes: list[str] = []
    for name, value in _pins_of(faults):
        if getattr(job.pin, name) is None:
            pins: dict[str, Any] = {name: value}
            job = replace(job, pin=replace(job.pin, **pins))
            changes.append(f"pinned {name}: {str(value).lower()}")
    for name in _options_of(faults):
        if _is_set(job.trainer, name):
            job = replace(job, trainer=replace(job.trainer, **{name: None}))
            changes.append(f"without trainer.{name}")
    return job, tuple(changes)


def _pins_of(faults: Iterable[Fault]) -> Iterator[tuple[str, int | bool]]:
    """(name, value) of the first pin that each fault names."""
    for fault in faults:
        found = _PIN.search(fault.message)
        if found is None or found[1] not in _PINS:
            continue
        if found[2] in ("true", "false"):
            yield found[1], found[2] == "true"
        elif found[2].isdigit():
            yield found[1], int(found[2])


def _options_of(faults: Iterable[Fault]) -> Iterator[str]:
    """Trainer options of the job that faults are about."""
    for fault in faults:
        if fault.field.startswith(_OPTION):
            yield fault.field.removeprefix(_OPTION)


def _is_set(options: TrainerOptions, name: str) -> bool:
    return getattr(options, name, None) is not None


def _priced(result: SearchResult, job: Job, predictor: Predictor) -> float:
    """Step of the refused plan; as it is on record where it cannot be priced now."""
    inputs = result.inputs
    try:
        return estimate(result.plan, inputs.model, inputs.cluster, job, predictor).step_seconds
    except HetplanError:
        return result.estimate.step_seconds
