"""Do log and plan belong together? Settings that the trainer printed, against the plan's."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import Fault, InputError
from hetplan.launchers.compare_steps import devices_of
from hetplan.plans.plan import Replica
from hetplan.search.result import SearchResult
from hetplan.trainers.training_log import TrainingLog

_WORDS = {
    "world_size": "devices",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "microbatch_size": "microbatch size",
    "global_batch_size": "global batch size",
    "sequence_length": "sequence length",
    "num_layers": "layers",
    "hidden_size": "hidden size",
}


def check_facts(log: TrainingLog, result: SearchResult) -> None:
    """An InputError with every setting in which the log is of another run than the plan's."""
    planned = dict(planned_facts(result))
    faults = [
        Fault(
            file=log.files[0],
            message=f"the log has {_WORDS[fact.name]} {fact.value}, the plan {planned[fact.name]}: "
            "this is another run; price its layout with `hetplan estimate ... --out` and compare "
            "with that",
        )
        for fact in log.facts
        if fact.name in planned and planned[fact.name] != fact.value
    ]
    if faults:
        raise InputError(*faults)


def planned_facts(result: SearchResult) -> Iterator[tuple[str, int]]:
    """The plan's settings; those that differ from stage to stage are left out."""
    plan, inputs = result.plan, result.inputs
    yield "world_size", devices_of(result)
    yield "global_batch_size", inputs.job.global_batch_size
    yield "sequence_length", inputs.job.sequence_length
    yield "num_layers", inputs.model.num_layers
    yield "hidden_size", inputs.model.hidden_size
    if len(plan.pipelines) == 1:
        yield "pp", len(plan.pipelines[0].stages)
    replicas = [
        replica
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    ]
    for name in ("tp", "cp", "ep", "microbatch_size"):
        values = {_value(replica, name) for replica in replicas}
        if len(values) == 1:
            yield name, values.pop()


def _value(replica: Replica, name: str) -> int:
    found: int = getattr(replica, name)
    return found
