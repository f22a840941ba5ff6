"""What the loop is asked, read once, and how what it asks for is trained or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.closed_loop.files import LoopFiles
from evaluation.closed_loop.measuring import Say
from evaluation.closed_loop.training import in_turn, keep_trained, read_trained
from evaluation.closed_loop.values import LoopPlan, LoopSpec, TrainedPlan
from hetplan.cluster.spec import Cluster
from hetplan.emulation.values import Emulation
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.profiling.pacing import load_pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the loop trains, read once."""

    files: LoopFiles
    spec: LoopSpec
    model: ModelSpec
    cluster: Cluster
    job: Job
    say: Say


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTrain:
    """One training."""

    name: str
    """Of its file."""
    plan: LoopPlan
    job: Job


def train_missing(
    asked: Asked,
    emulation: Emulation,
    kind: str,
    where: str,
    order: Sequence[ToTrain],
    *,
    warmup_steps: int,
    steps: int,
) -> list[TrainedPlan]:
    """What each training measured at the pace of `kind`; those done before are read.

    `where` names their folder.
    """
    files = asked.files
    have = {each.name: read_trained(files.trained(where, each.name)) for each in order}
    missing = [each for each in order if have[each.name] is None]
    if missing:
        pace = load_pace(files.pace(kind))
        with in_turn(emulation, asked.cluster) as turns:
            for at, each in enumerate(missing, start=1):
                done = turns.train(
                    asked.model,
                    each.job,
                    each.plan,
                    pace,
                    warmup_steps=warmup_steps,
                    steps=steps,
                )
                keep_trained(files.trained(where, each.name), done)
                have[each.name] = done
                asked.say(f"{where} {at}/{len(missing)}: {told(done)}")
    return [one for each in order if (one := have[each.name]) is not None]


def told(done: TrainedPlan) -> str:
    """One line of progress."""
    return (
        f"{done.name}: predicted {done.predicted_seconds:.3f} s, measured "
        f"{done.measured_seconds:.3f} s ({done.error:+.1%}), overrun {done.overrun:.0%}"
    )
