"""Which templates, and how many copies of each, so that one step is done soonest?

At a step of T seconds a template does m(T) microbatches; its flow x (sequences per tick) is whole,
and such that every stage divides a node or is whole nodes. Wanted: flows whose devices are there
and which do the whole batch, at the least T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from hetplan.cluster.spec import Cluster
from hetplan.search.several.options import Options
from hetplan.search.several.templates import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A template with its number of sequences per tick."""

    template: Template
    flow: int


def flows_of(
    template: Template, options: Options, cluster: Cluster, batch: int, shards: int
) -> tuple[int, ...]:
    """Flows with which the template has room on empty islands and suits their nodes.

    They divide the batch: the space has no others (`hetplan.search.several.ticks`).
    Every stage has at least `shards` data-parallel ranks.
    """
    most = batch
    for island, use in template.use:
        most = min(most, int(cluster.islands[island].num_usable_devices / use + 1e-9))
    found = []
    for flow in range(template.least_flow, most + 1, template.least_flow):
        if batch % flow:
            continue
        for island, o in zip(template.islands, template.options, strict=True):
            option = options.options[o]
            size = option.tp * flow // option.microbatch_size
            per_node = cluster.islands[island].devices_per_node
            if flow < shards * option.microbatch_size or (per_node % size and size % per_node):
                break
        else:
            found.append(flow)
    return tuple(found)


def most_sequences(
    templates: Sequence[Template],
    flows: Sequence[Sequence[int]],
    counts: Sequence[int],
    cluster: Cluster,
    *,
    most_pipelines: int,
    effort: float,
) -> tuple[int, tuple[Flow, ...]]:
    """(most sequences per step, the flows that do them); `counts`: microbatches of each template.

    `effort`: limit in the solver's own deterministic seconds.
    """
    model = cp_model.CpModel()
    variables, used = [], []
    for allowed, count in zip(flows, counts, strict=True):
        values = [0, *allowed] if count else [0]
        variable = model.new_int_var_from_domain(cp_model.Domain.from_values(values), "")
        on = model.new_bool_var("")
        model.add(variable <= values[-1] * on)
        variables.append(variable)
        used.append(on)
    _room(model, templates, variables, cluster)
    model.add(sum(used) <= most_pipelines)
    model.maximize(sum(count * x for count, x in zip(counts, variables, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return 0, ()
    chosen = tuple(
        Flow(template=template, flow=solver.value(x))
        for template, x in zip(templates, variables, strict=True)
        if solver.value(x)
    )
    return int(solver.objective_value), chosen


def _room(
    model: cp_model.CpModel,
    templates: Sequence[Template],
    variables: Sequence[cp_model.IntVar],
    cluster: Cluster,
) -> None:
    scale = 720720  # microbatch sizes up to 16 divide it: shares of devices become whole numbers
    for index, island in enumerate(cluster.islands):
        terms = [
            round(use * scale) * x
            for template, x in zip(templates, variables, strict=True)
            for at, use in template.use
            if at == index
        ]
        if terms:
            model.add(sum(terms) <= round(island.num_usable_devices * scale))
