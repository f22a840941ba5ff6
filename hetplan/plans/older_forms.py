"""What does the data of an older plan file mean in the newest form?

Forms 1 and 2 of a plan sharded the optimizer state and nothing else. Files before `hetplan.plan/8`
did not name the number format of a reduction: it was that of the job's trainer
(`hetplan.job.trainer`), which is named now.

All of this works on raw data: what has the wrong type is left as it is, for the reader to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.errors import InputError
from hetplan.job.spec import Precision, TrainerOptions
from hetplan.job.trainer import trainer_settings_of

_TIED = "tied_embedding_precision"


def with_sharding(plan: dict[str, object]) -> dict[str, object]:
    """The plan's data with the kind of its sharding."""
    shards = plan.get("optimizer_shards")
    if "sharding" in plan or not isinstance(shards, int) or shards < 2:
        return plan
    return {**plan, "sharding": "optimizer"}


def with_formats(plan: dict[str, object], job: object = None) -> dict[str, object]:
    """The plan's data with the format of every reduction, as its job's trainer has it.

    `job`: the job's data; without it the target's default counts. Data that names any format is
    not older and comes back as it is.
    """
    groups = plan.get("reduction_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        return plan
    if _TIED in plan or any("precision" in each for each in groups):
        return plan
    implied = _implied(plan, job if isinstance(job, dict) else {})
    return {
        **plan,
        "reduction_groups": [{**each, "precision": implied} for each in groups],
        _TIED: implied if plan.get("tied_embedding_devices") else None,
    }


def _implied(plan: Mapping[str, object], job: Mapping[str, object]) -> object:
    """The format of gradients under the plan's target; the plan's own where nothing says."""
    own = plan.get("precision")
    trainer = job.get("trainer")
    asked = trainer.get("gradient_precision") if isinstance(trainer, dict) else None
    target = plan.get("target")
    try:
        options = TrainerOptions(gradient_precision=_precision(asked))
        found = _precision(job.get("precision")) or _precision(own)
        if found is None or not isinstance(target, str):
            return own
        return trainer_settings_of(target, found, options).gradient_precision.value
    except InputError:
        return own  # the job asks for what its target cannot run, which others say


def _precision(word: object) -> Precision | None:
    return Precision(word) if word in [each.value for each in Precision] else None


def searched_with_formats(data: dict[str, object]) -> dict[str, object]:
    """The data of a search result, its plan and the alternatives with their formats."""
    inputs = data.get("inputs")
    job = inputs.get("job") if isinstance(inputs, dict) else None
    found = dict(data)
    if isinstance(data.get("plan"), dict):
        found["plan"] = _planned(data["plan"], job)
    others = data.get("alternatives")
    if isinstance(others, list):
        found["alternatives"] = [
            {**each, "plan": _planned(each["plan"], job)}
            if isinstance(each, dict) and "plan" in each
            else each
            for each in others
        ]
    return found


def _planned(plan: object, job: object) -> object:
    return with_formats(plan, job) if isinstance(plan, dict) else plan
