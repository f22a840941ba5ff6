"""Trainers: what each can run, how its launches are written, read and checked, and its logs.

`hetplan emit` writes folders for the trainers of `TRAINERS`. What their plans may be is data of
`hetplan.plans.targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from hetplan.errors import Fault, InputError

if TYPE_CHECKING:
    from hetplan.job.spec import Job
    from hetplan.model.spec import ModelSpec
    from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
    from hetplan.schedulers.rank_layout import RankLayout
    from hetplan.search.result import SearchResult

_MODULES = {
    "megatron": "megatron.write",
    "mindspeed": "megatron.mindspeed",
    "flagscale": "flagscale.write",
    "torchtitan": "torchtitan.write",
}
"""Modules that export `TRAINER`, imported when they are used."""
TRAINERS = tuple(_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A target of `hetplan emit` that is started by torchrun."""

    name: str
    plan_target: str
    """Entry of `hetplan.plans.targets.TARGETS` whose limits its plans obey."""
    faults: Callable[[SearchResult, RankLayout, EmissionOptions], tuple[Fault, ...]]
    """Everything in a legal plan of that target that this trainer cannot be told; empty: nothing.
    Fields are places in the result (`plan.pipelines[0]...`, `inputs.job...`); each message says
    what the plan has, why it cannot be, and the pin or setting that avoids it."""
    launch: Callable[[SearchResult, RankLayout, EmissionOptions], TrainerLaunch]
    """Of a result without faults."""
    question_faults: Callable[[ModelSpec, Job], Iterable[Fault]] = lambda model, job: ()
    """Those of any plan of this model and job, with fields of both (`inputs.model`): they are
    refused before a search."""
    data_outermost: bool = False
    """Whether it can number ranks tp, cp, pp, dp as well (`RankLayout.data_outermost`)."""


def trainer_named(name: str) -> Trainer:
    """The trainer of this name; an InputError that lists the known ones otherwise."""
    if name not in TRAINERS:
        raise InputError(f"--target {name!a}: no such trainer; {', '.join(TRAINERS)} are")
    trainer: Trainer = import_module(f"{__name__}.{_MODULES[name]}").TRAINER
    return trainer
