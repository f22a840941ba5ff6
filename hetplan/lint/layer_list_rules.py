"""Rules about lists of layers: do stages, profiles and sizes hold the layers of their model?"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.lint.evidence import Evidence, stage_numbers
from hetplan.lint.findings import Severity
from hetplan.lint.known import known_model
from hetplan.lint.rows import LayerRow, PlanCase, RunRow, StagePlan
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting

PARAMETERS_DIFFER = 0.02  # padding of the vocabulary changes an embedding by less


def _layer_lists(evidence: Evidence) -> Iterator[Sighting]:
    yield from _run_lists(evidence)
    yield from _plan_lists(evidence)
    yield from _case_lists(evidence)


def _other_model(evidence: Evidence) -> Iterator[Sighting]:
    yield from _profile_lists(evidence)
    yield from _size_lists(evidence)


def _run_lists(evidence: Evidence) -> Iterator[Sighting]:
    wrong: list[tuple[RunRow, str]] = []
    for row in evidence.material.runs:
        layers = stage_numbers(row.other, "layers_per_stage")
        degrees = stage_numbers(row.other, "tp_per_stage")
        if layers is not None:
            if len(layers) != row.pp:
                wrong.append((row, f"{len(layers)} stages are listed, pp is {row.pp}"))
            # The embedding and the head may be layers of the list, or not.
            elif row.layers is not None and not 0 <= sum(layers) - row.layers <= 2:
                wrong.append((row, f"stages hold {sum(layers)} layers, the model {row.layers}"))
        if degrees is not None and len(degrees) != row.pp:
            wrong.append((row, f"{len(degrees)} tp degrees are listed, pp is {row.pp}"))
    yield from per_file(wrong, lambda entry: entry[0].place, lambda group: group[0][1])


def _plan_lists(evidence: Evidence) -> Iterator[Sighting]:
    wrong: list[tuple[StagePlan, str]] = []
    for plan in evidence.material.plans:
        layers = [layer for stage in plan.layers for layer in stage]
        model = known_model(plan.model, evidence.material.models)
        if layers != list(range(len(layers))):
            wrong.append((plan, "stages do not hold every layer once and in order"))
        elif model is not None and not 0 <= len(layers) - model.num_layers <= 2:
            wrong.append(
                (
                    plan,
                    f"stages hold {len(layers)} layers, {model.name} has "
                    f"{model.num_layers} and two ends",
                )
            )
        if not len(plan.layers) == len(plan.tp) == len(plan.dp):
            wrong.append(
                (
                    plan,
                    f"{len(plan.layers)} stages of layers, {len(plan.tp)} of devices, "
                    f"{len(plan.dp)} of dp",
                )
            )
        elif any(len(replicas) != dp for replicas, dp in zip(plan.tp, plan.dp, strict=True)):
            wrong.append((plan, "replicas of a stage are not as many as its dp"))
    yield from per_file(wrong, lambda entry: entry[0].place, lambda group: group[0][1])


def _case_lists(evidence: Evidence) -> Iterator[Sighting]:
    wrong: list[tuple[PlanCase, str]] = []
    for case in evidence.material.cases:
        if sum(case.layers) != case.model_layers:
            words = f"{case.planner}: stages hold {sum(case.layers)} of {case.model_layers} layers"
            wrong.append((case, words))
        if not case.pp == len(case.layers) == case.stages:
            wrong.append(
                (
                    case,
                    f"{case.planner}: pp {case.pp}, {len(case.layers)} numbers of "
                    f"layers, {case.stages} stages",
                )
            )
    yield from per_file(wrong, lambda entry: entry[0].place, lambda group: group[0][1])


def _profile_lists(evidence: Evidence) -> Iterator[Sighting]:
    """Profiles that hold another number of layers than their model."""
    rows = [row for row in evidence.material.layers if row.layer is not None]
    wrong: list[tuple[LayerRow, str]] = []
    for group in grouped(
        rows, lambda row: (row.place.file, row.source, row.device, row.model)
    ).values():
        model = known_model(group[0].model, evidence.material.models)
        if model is None:
            continue
        found = {row.layer for row in group if row.layer is not None}
        last = max(found)
        if last >= model.num_layers + 2 or last < model.num_layers:
            wrong.append(
                (
                    next(row for row in group if row.layer == last),
                    f"layers of {group[0].model} go up to {last}; {model.name} has "
                    f"{model.num_layers}, an embedding and a head: {model.num_layers + 2} in all",
                )
            )
    yield from per_file(wrong, lambda entry: entry[0].place, lambda group: group[0][1])


def _size_lists(evidence: Evidence) -> Iterator[Sighting]:
    """Tables of layer sizes that are not their model's."""
    for (_, name), rows in grouped(
        [row for row in evidence.material.sizes if row.tp == 1],
        lambda row: (row.place.file, row.model),
    ).items():
        model = known_model(name, evidence.material.models)
        if model is None:
            continue
        kinds = model.layers
        wrong = []
        for row in rows:
            if row.layer >= len(kinds):
                wrong.append((row, f"layer {row.layer} of a model of {len(kinds)}"))
                continue
            wanted = model.parameters(kinds[row.layer])
            if abs(row.parameters / wanted - 1) > PARAMETERS_DIFFER:
                wrong.append(
                    (
                        row,
                        f"{kinds[row.layer]} has {row.parameters:,.0f} parameters, that of "
                        f"{model.name} {wanted:,}",
                    )
                )
        if wrong:
            kinds_of_wrong = grouped(wrong, lambda entry: entry[1])
            yield sighting(
                (row.place for row, _ in wrong),
                f"{name}: {'; '.join(list(kinds_of_wrong)[:3])}",
            )


RULES = (
    Rule(
        id="layer-list-mismatch",
        severity=Severity.IMPOSSIBLE,
        title="a layer list that is not the model's",
        explanation="The stages of a run or a plan do not hold every layer of the model once: the "
        "list belongs to another run, or a stage was left out.",
        advice="Complete the list.",
        check=_layer_lists,
    ),
    Rule(
        id="profile-of-another-model",
        severity=Severity.SUSPICIOUS,
        title="layers that are not those of the model named",
        explanation="The number of layers of a profile, or their parameters, are not those of the "
        "published model of that name: another model was measured under it, an end of the model "
        "is missing (a head without its projection), or a norm is counted as a layer.",
        advice="Name the model that was measured; take missing layers from elsewhere.",
        check=_other_model,
    ),
)
