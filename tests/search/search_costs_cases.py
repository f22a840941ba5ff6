"""Random families and chosen plans of every form, and their step by adding up a space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from search_jobs import island
from search_jobs import model as dense_model

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.plan import Schedule
from hetplan.search.space.stage_table import FIRST, LAST, StageTable
from hetplan.search.table_maker import transformer_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A plan of a space: mesh, recomputation, units and extra depth of every stage."""

    meshes: tuple[int, ...]
    variants: tuple[int, ...]
    units: tuple[int, ...]
    extra: tuple[int, ...]


def roles(count: int) -> list[int]:
    return [FIRST * (s == 0) + LAST * (s == count - 1) for s in range(count)]


def in_flight(space: StageTable, slots: Slots, s: int) -> int:
    return min(len(slots.meshes) - s + slots.extra[s], space.num_microbatches)


def chosen(space: StageTable, cluster: Cluster, slots: Slots) -> ChosenPlan:
    """The same plan as choices."""
    family, count = space.family, len(slots.meshes)
    stages = []
    for s, (at, role) in enumerate(zip(slots.meshes, roles(count), strict=True)):
        mesh = family.meshes[at]
        stages.append(
            ChosenStage(
                parts=tuple(
                    Part(island=cluster.islands[i].name, shape=shape)
                    for i, shape in zip(mesh.islands, mesh.shapes, strict=True)
                ),
                layers=(transformer_layers(space, role, slots.units[s]),),
                recompute=family.recompute[slots.variants[s]],
                warmup_depth=in_flight(space, slots, s),
            )
        )
    return ChosenPlan(
        pipelines=(
            ChosenPipeline(
                stages=tuple(stages),
                num_microbatches=family.num_microbatches,
                schedule=Schedule(name="1f1b"),
            ),
        ),
        sharding=family.sharding,
        early_sends=family.early_sends,
    )


def step_seconds(space: StageTable, slots: Slots) -> float:
    """Sum and replay of the space's numbers."""
    count = len(slots.meshes)
    at, v, n = (np.array(each) for each in (slots.meshes, slots.variants, slots.units))
    role = np.array(roles(count))
    names = ("send_forward", "send_backward", "wire_latency", "rendezvous_extra")
    sends = {name: np.zeros(count - 1) for name in names}
    level = 0.0
    placed = 0
    for s in range(count - 1):
        left, right = int(at[s]), int(at[s + 1])
        placed = placed + 1 if s and at[s - 1] == left else 0
        out = left == right and (placed + 1) % space.stages_per_node[left] == 0
        for name in names:
            sends[name][s] = (
                getattr(space.node_links, name)[left]
                if out
                else getattr(space.links, name)[left, right]
            )
        if space.norm is not None:
            levels = space.norm.node_links[left] if out else space.norm.links[left, right]
            level = max(level, float(levels))
    after = space.after[role, at, n].copy()
    leaving = space.leaving[role, at, n]
    if count > 1:
        after[[0, -1]] += space.tied[at[0], at[-1]]
    if space.norm is not None:
        after += float(space.norm.inside[at].max() - space.norm.inside.min())
        after += (count - 1).bit_length() * level
    times = PipelineTimes(
        schedule="1f1b",
        num_microbatches=space.num_microbatches,
        warmup=tuple(in_flight(space, slots, s) for s in range(count)),
        forward=(space.extra_forward[role, v, at] + n * space.forward[v, at])[:, None],
        backward=(space.extra_backward[role, v, at] + n * space.backward[v, at])[:, None],
        weight=np.zeros((count, 1)),
        **sends,
        link_forward=np.full(count - 1, -1),
        link_backward=np.full(count - 1, -1),
        shared_forward=np.zeros(count - 1),
        shared_backward=np.zeros(count - 1),
        exchange=Exchange.MEGATRON,
    )
    ends = step_ends([times], rendezvous=space.rendezvous)[0]
    return float(leaving.max()) + float((ends + after - leaving).max())


def fits(space: StageTable, slots: Slots) -> bool:
    """Whether the memory of every stage holds what it has."""
    return all(
        slots.units[s]
        <= space.most_layers[slots.variants[s], role, slots.meshes[s], in_flight(space, slots, s)]
        for s, role in enumerate(roles(len(slots.meshes)))
    )


def random_slots(rng: np.random.Generator, space: StageTable) -> Slots | None:
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
    choices = len(space.family.recompute)
    extra = [0] * count
    for s in range(count - 2, -1, -1):
        more = rng.integers(0, 2) if meshes[s] != meshes[s + 1] else 0
        extra[s] = min(space.family.most_extra_depth, extra[s + 1] + int(more))
    return Slots(
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
