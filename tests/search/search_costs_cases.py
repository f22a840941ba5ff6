"""Random families and chosen plans of every form, and their step by adding up a space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from search_jobs import island
from search_jobs import model as dense_model
from synthetic_plans import Row, chain_of_row

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.one_f_one_b.rows import Slots
from hetplan.search.one_f_one_b.solver import chosen_of_row
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import StageTable


def chosen(family: Family, space: StageTable, cluster: Cluster, row: Row) -> ChosenPlan:
    """The plan of a row."""
    slots = Slots(*(np.array(each) for each in (row.meshes, row.variants, row.units, row.extra)))
    return chosen_of_row(family, space, [island.name for island in cluster.islands], slots)


def fits(space: StageTable, row: Row) -> bool:
    """Whether the memory of every stage holds what it has."""
    most = chain_of_row(space, row).most_layers.max(axis=0)
    return bool((np.array(row.units) <= most).all())


def random_slots(rng: np.random.Generator, space: StageTable) -> Row | None:
    """Meshes with disjoint islands, one after the other, as many stages as there is room for."""
    order, used = [], 0
    for at in rng.permutation(len(space.max_stages)).tolist():
        if not used & int(space.island_mask[at]):
            order.append(at)
            used |= int(space.island_mask[at])
    order = order[: int(rng.integers(1, len(order) + 1))]
    meshes: list[int] = []
    for at in order:
        meshes += [at] * int(rng.integers(1, space.max_stages[at] + 1))
    meshes = meshes[: min(space.num_layers, space.stage_limit)]
    count = len(meshes)
    cuts = np.sort(rng.choice(np.arange(1, space.num_layers), count - 1, replace=False))
    units = np.diff([0, *cuts.tolist(), space.num_layers])
    choices = len(space.forward)
    extra = [0] * count
    for s in range(count - 2, -1, -1):
        more = rng.integers(0, 2) if meshes[s] != meshes[s + 1] else 0
        extra[s] = min(space.most_extra_depth, extra[s + 1] + int(more))
    return Row(
        meshes=tuple(meshes),
        variants=tuple(int(each) for each in rng.integers(0, choices, count)),
        units=tuple(int(each) for each in units),
        extra=tuple(extra),
    )


def regions_cluster(rng: np.random.Generator, kinds: Sequence[int]) -> Cluster:
    """Islands of these kinds of four nodes of four devices, every second one in another region."""
    islands = []
    for index, kind in enumerate(kinds):
        one = island(
            f"i{index}",
            kind=f"kind{kind}",
            teraflops=50.0 * (1 + kind),
            gigabytes=float(rng.choice([1.0, 4.0, 64.0])),
            nodes=4,
            per_node=4,
            gigabytes_per_second=float(rng.choice([5.0, 50.0])),
        )
        islands.append(replace(one, region="here" if index % 2 == 0 else "there"))
    return Cluster(
        name="regions",
        islands=tuple(islands),
        within_region=_link(float(rng.choice([2e9, 2e10])), 5e-5),
        across_regions=_link(float(rng.choice([2e8, 2e9])), 5e-3),
    )


def _link(rate: float, latency: float) -> Link:
    return Link(
        bandwidth_bytes_per_second=rate, latency_seconds=latency, transport=Transport.HOST_STAGED
    )


def unlike_model(form: str, layers: int, *, tied: bool) -> ModelSpec:
    """Dense, alternating windows, or experts behind two dense layers with a prediction layer."""
    plain = dense_model(layers, tied=tied)
    layer = plain.layer_runs[0].layer
    if form == "dense":
        return plain
    if form == "windows":
        short = replace(layer, attention=replace(layer.attention, window=256))  # type: ignore[type-var]
        runs = tuple(LayerRun(count=1, layer=each) for each in (short, layer) * (layers // 2))
        return replace(plain, layer_runs=(*runs, LayerRun(count=1, layer=short)))
    experts = replace(
        layer, mlp=Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=512)
    )
    runs = (LayerRun(count=2, layer=layer), LayerRun(count=layers - 2, layer=experts))
    return replace(plain, layer_runs=runs, num_mtp_layers=1, mtp_layer=experts)
