"""How a plan's degrees, layers, batch, recomputation and networks are told to Megatron-LM.

Data parallelism has no flag: it is what is left of the ranks (arguments.py, validate_args).

Layers are cut by --pipeline-model-parallel-layout. Symbols: E embedding, t transformer layer, m
multi-token prediction layer, L loss; `t*10` repeats one symbol; `|` ends a chunk. Chunks count
through all stages, then on to the next virtual stage (megatron/core/transformer/
transformer_config.py, `pipeline_model_parallel_layout`). Only repeats of one symbol are written:
the parser (pipeline_parallel_layer_layout.py, `parse_str_to_list`) expands parentheses in one pass
and without nesting, takes no blanks, and repeats `|` like any symbol.

`--nccl-communicator-config-path` takes a YAML file in which a group's `net_name` is IB or Socket
(megatron/core/parallel_state.py, get_nccl_options). A plan says of every link between nodes whether
the device's library moves device memory over it, or bytes are staged through host memory: staged
groups get Socket, which NCCL stages through host memory; IB is named only where every host's domain
names its RDMA devices. One network is for all groups of a kind: with one staged boundary all
boundaries use sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import yaml
from numpy.typing import NDArray

from hetplan.cluster.spec import Cluster, Transport
from hetplan.errors import Fault
from hetplan.job.spec import Job
from hetplan.model.layers import Attention
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.pieces import (
    Devices,
    Places,
    data_ranks,
    expert_copies,
    stage_array,
    stage_copies,
)
from hetplan.plans.plan import LayerRange, Pipeline, Plan, RecomputeGranularity, RecomputeModule
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers.megatron.model import grouped_experts, model_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """What all stages of a plan for Megatron-LM share."""

    tp: int
    cp: int
    ep: int
    etp: int
    dp: int
    pp: int
    virtual_stages: int
    microbatch_size: int
    sequence_parallel: bool
    copies: int
    """dp * cp."""
    expert_copies: int
    """Copies of one routed expert."""


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan that is legal for target megatron."""
    pipeline = plan.pipelines[0]
    stage = pipeline.stages[0]
    first = stage.replicas[0]
    return Degrees(
        tp=first.tp,
        cp=first.cp,
        ep=first.ep,
        etp=first.etp,
        dp=data_ranks(stage),
        pp=len(pipeline.stages),
        virtual_stages=pipeline.schedule.virtual_stages,
        microbatch_size=first.microbatch_size,
        sequence_parallel=first.sequence_parallel,
        copies=stage_copies(stage),
        expert_copies=expert_copies(stage),
    )


def parallel_arguments(
    result: SearchResult, ranks: RankLayout, *, context_exchange: bool
) -> Iterator[tuple[str, ...]]:
    """Degrees, layout, rank order."""
    plan, inputs = result.plan, result.inputs
    degrees = degrees_of(plan)
    yield "--tensor-model-parallel-size", str(degrees.tp)
    yield "--pipeline-model-parallel-size", str(degrees.pp)
    yield "--context-parallel-size", str(degrees.cp)
    if degrees.sequence_parallel:
        yield ("--sequence-parallel",)
    if model_parts(inputs.model, inputs.job.sequence_length).experts is not None:
        yield "--expert-model-parallel-size", str(degrees.ep)
        # Left out it is tp.
        yield "--expert-tensor-parallel-size", str(degrees.etp)
    if degrees.pp > 1:
        layout = layout_text(plan.pipelines[0], inputs.model)
        yield "--pipeline-model-parallel-layout", layout
    if degrees.cp > 1:
        yield "--cp-comm-type", "a2a" if context_exchange else "p2p"
    if ranks.data_outermost:
        yield ("--use-tp-pp-dp-mapping",)


def batch_arguments(result: SearchResult) -> Iterator[tuple[str, ...]]:
    """Microbatch size of the first stage, global batch, tokens per sequence."""
    job = result.inputs.job
    yield "--micro-batch-size", str(degrees_of(result.plan).microbatch_size)
    yield "--global-batch-size", str(job.global_batch_size)
    yield "--seq-length", str(job.sequence_length)


def recompute_arguments(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Recomputation, the same on all stages (transformer_block.py, _checkpointed_forward)."""
    recompute = plan.pipelines[0].stages[0].recompute
    if recompute.granularity is RecomputeGranularity.NONE:
        return
    yield "--recompute-granularity", recompute.granularity.value
    if recompute.granularity is RecomputeGranularity.SELECTIVE:
        yield "--recompute-modules", *(module.value for module in recompute.modules)
        return
    # uniform 1: every layer keeps its input alone. block k: so do the first k of a chunk.
    yield "--recompute-method", "uniform" if recompute.layers is None else "block"
    yield "--recompute-num-layers", str(1 if recompute.layers is None else recompute.layers)


def overlap_arguments(plan: Plan) -> Iterator[tuple[str, ...]]:
    """What runs beside compute; what cannot be there at these degrees is left out."""
    degrees, overlap = degrees_of(plan), plan.overlap
    if overlap.reduction and plan.reduction_groups:
        yield ("--overlap-grad-reduce",)
        if overlap.gathering and plan.optimizer_shards > 1:
            yield ("--overlap-param-gather",)
    if overlap.tensor_parallel:
        yield ("--tp-comm-overlap",)
    if overlap.expert_parallel:
        yield ("--overlap-moe-expert-parallel-comm",)
    # Without interleaving sends are never overlapped (arguments.py forces it off).
    if degrees.virtual_stages > 1 and not overlap.send:
        yield ("--no-overlap-p2p-communication",)


# ---- what cannot be told


def parallel_faults(result: SearchResult, *, context_exchange: bool) -> Iterator[Fault]:
    """Degrees and recomputation that Megatron-LM refuses or does otherwise."""
    plan, model, job = result.plan, result.inputs.model, result.inputs.job
    yield from _context_faults(plan, model, job, context_exchange=context_exchange)
    yield from _recompute_faults(plan, model, job)


def _context_faults(
    plan: Plan, model: ModelSpec, job: Job, *, context_exchange: bool
) -> Iterator[Fault]:
    degrees = degrees_of(plan)
    if degrees.cp == 1:
        return
    parts = model_parts(model, job.sequence_length)
    if any(window is not None for window in parts.windows):
        yield Fault(
            field="plan.pipelines[0]",
            message=f"cp {degrees.cp} and attention windows, which were not verified together: pin "
            "cp: 1",
        )
    attention = parts.attention
    if context_exchange and isinstance(attention, Attention):
        heads = attention.num_kv_heads // degrees.tp
        if heads % degrees.cp:
            # transformer_engine/pytorch/attention: "a2a" wants both kinds of heads divisible.
            yield Fault(
                field="inputs.job.trainer.context_exchange",
                message=f"on, and a rank has {heads} key-value heads for cp {degrees.cp}; the "
                "exchange deals heads out: leave context_exchange out, or pin a smaller cp or tp",
            )
    if not context_exchange and not plan.overlap.context_parallel:
        yield Fault(
            field="plan.overlap.context_parallel",
            message="off; Transformer Engine's ring attention always sends beside its attention: "
            "set overlap.context_parallel to true in the plan and price it again",
        )


def _recompute_faults(plan: Plan, model: ModelSpec, job: Job) -> Iterator[Fault]:
    parts = model_parts(model, job.sequence_length)
    wants = "pin recompute: true (whole layers) or false, or take another module"
    for s, stage in enumerate(plan.pipelines[0].stages):
        field = f"plan.pipelines[0].stages[{s}].recompute.modules"
        modules = stage.recompute.modules
        if RecomputeModule.ACTIVATION in modules:
            # transformer_config.py: moe_act only with moe_grouped_gemm; dense MLPs have none.
            if parts.dense is not None or parts.experts is None:
                yield Fault(
                    field=field,
                    message=f"{RecomputeModule.ACTIVATION}; Megatron-LM recomputes it in experts "
                    f"alone, not in dense MLPs: {wants}",
                )
            elif parts.experts.shared_ffn_hidden_size or not grouped_experts(job):
                yield Fault(
                    field=field,
                    message=f"{RecomputeModule.ACTIVATION}; Megatron-LM recomputes it in routed "
                    f"experts with --moe-grouped-gemm (bfloat16) alone: {wants}",
                )
        if RecomputeModule.EXPERTS in modules and parts.experts is None:
            message = f"{RecomputeModule.EXPERTS}, and the model has no experts: {wants}"
            yield Fault(field=field, message=message)
        if RecomputeModule.MLP in modules and parts.dense is None:
            message = f"{RecomputeModule.MLP}, and the model has no dense MLPs: {wants}"
            yield Fault(field=field, message=message)


# ---- layers of the stages

_SYMBOLS = (
    (LayerKind.EMBEDDING, "E"),
    (LayerKind.TRANSFORMER, "t"),
    (LayerKind.MULTI_TOKEN_PREDICTION, "m"),
    (LayerKind.HEAD, "L"),
)


def layout_text(pipeline: Pipeline, model: ModelSpec) -> str:
    """The layout of a pipeline, as in `Et*10|t*10|t*6|t*6L`."""
    kinds = model.layers
    virtual = pipeline.schedule.virtual_stages
    chunks = [stage.chunks[v] for v in range(virtual) for stage in pipeline.stages]
    return "|".join(_chunk_text(chunk, kinds) for chunk in chunks)


def _chunk_text(chunk: LayerRange, kinds: tuple[LayerKind, ...]) -> str:
    own = kinds[chunk.start : chunk.stop]
    counts = ((symbol, own.count(kind)) for kind, symbol in _SYMBOLS)
    return "".join(
        symbol if count == 1 else f"{symbol}*{count}" for symbol, count in counts if count
    )


def layout_faults(pipeline: Pipeline, model: ModelSpec) -> Iterator[Fault]:
    """Why Megatron refuses the cut; legal plans break only its rules about further predictions.

    `validate_layer_layout`: all multi-token prediction layers are in one chunk, in the last virtual
    stage of its rank.
    """
    first = 1 + model.num_layers
    stop = first + model.num_mtp_layers
    holding = [
        s
        for s, stage in enumerate(pipeline.stages)
        for chunk in stage.chunks
        if max(chunk.start, first) < min(chunk.stop, stop)
    ]
    if len(holding) > 1:
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"the {model.num_mtp_layers} multi-token prediction layers are cut between "
            f"stages {holding[0]} and {holding[-1]}; Megatron-LM keeps them in one chunk: plan "
            "again, plans that are searched hold them together with the head",
        )


# ---- networks of process groups

TRANSPORT_FILE = "transport.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNetwork:
    """Network of one kind of process group."""

    group: str
    """As get_nccl_options names it."""
    staged: bool
    """Any group of the kind has a link that is staged through host memory."""


def group_networks(plan: Plan, cluster: Cluster) -> tuple[GroupNetwork, ...]:
    """Every kind of group that leaves a node, with its network."""
    degrees = degrees_of(plan)
    places = Places(cluster=cluster)
    found = []
    for name, groups in _groups(plan, degrees):
        networks = [places.transports(group) for group in _unlike(places, groups)]
        if networks:
            staged = any(Transport.HOST_STAGED in network for network in networks)
            found.append(GroupNetwork(group=name, staged=staged))
    return tuple(found)


def _groups(plan: Plan, degrees: Degrees) -> Iterator[tuple[str, Devices]]:
    """(name, one row per group) of every kind with more than one rank."""
    devices = np.stack([stage_array(stage) for stage in plan.pipelines[0].stages])
    ranks = devices.reshape(degrees.pp, degrees.dp, degrees.cp, degrees.tp)
    kinds: list[tuple[str, Devices]] = [
        ("tp", _rows(ranks, 3)),
        ("cp", _rows(ranks, 2)),
        ("tp_cp", _rows(ranks, 2, 3)),
        ("dp", _rows(ranks, 1)),
        ("dp_cp", _rows(ranks, 1, 2)),
        ("tp_dp", _rows(ranks, 1, 3)),
        ("tp_dp_cp", _rows(ranks, 1, 2, 3)),
        ("pp", _rows(ranks, 0)),
        ("embd", _rows(ranks[[0, -1]] if degrees.pp > 1 else ranks[:1], 0)),
        ("mp", _rows(ranks, 0, 3)),
        ("intra_dist_opt_instance", _rows(ranks, 0, 1, 2, 3)),
    ]
    if degrees.ep > 1 or degrees.etp > 1:
        experts = devices.reshape(degrees.pp, degrees.expert_copies, degrees.ep, degrees.etp)
        kinds += [
            ("ep_tp", _rows(experts, 3)),
            ("ep", _rows(experts, 2)),
            ("tp_ep_mp", _rows(experts, 2, 3)),
            ("tp_ep_pp", _rows(experts, 0, 2, 3)),
            ("ep_dp", _rows(experts, 1)),
        ]
    yield from ((name, rows) for name, rows in kinds if rows.shape[1] > 1)


def _rows(ranks: Devices, *axes: int) -> Devices:
    """One row per group over these axes."""
    last = tuple(range(ranks.ndim - len(axes), ranks.ndim))
    size = int(np.prod([ranks.shape[axis] for axis in axes]))
    found: Devices = np.moveaxis(ranks, axes, last).reshape(-1, size)
    return found


def _unlike(places: Places, groups: Devices) -> Iterator[Devices]:
    """One group of every set of islands among those that leave a node."""
    nodes = places.nodes(groups)
    leaving = groups[(nodes != nodes[:, :1]).any(axis=1)]
    if not leaving.size:
        return
    islands: NDArray[np.int64] = places.islands(leaving)
    _, first = np.unique(islands, axis=0, return_index=True)
    seen: set[frozenset[int]] = set()
    for at in first.tolist():
        key = frozenset(islands[at].tolist())
        if key not in seen:
            seen.add(key)
            yield leaving[at]


def transport_text(plan: Plan, cluster: Cluster, ranks: RankLayout) -> str:
    """The file's text; empty where the groups need no networks of their own."""
    networks = group_networks(plan, cluster)
    if not any(network.staged for network in networks):
        return ""
    fabric = all(agent.host.domain.fabric_devices for agent in ranks.agents)
    chosen = {
        network.group: {"net_name": "Socket" if network.staged else "IB"}
        for network in networks
        if network.staged or fabric
    }
    return (
        "# Network of every kind of process group (--nccl-communicator-config-path): Socket where\n"
        "# the plan stages a link through host memory.\n"
        + yaml.safe_dump(chosen, sort_keys=True, default_flow_style=False)
    )


def transport_remarks(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What the file cannot say."""
    networks = group_networks(plan, cluster)
    staged = [network.group for network in networks if network.staged]
    if staged and len(staged) < len(networks):
        yield (
            f"{TRANSPORT_FILE}: groups {', '.join(staged)} use sockets, the others the hosts' "
            "own fabric. Barriers use the default group, for which Megatron-LM has no such "
            "setting: where all hosts have RDMA devices and their fabrics are not joined, NCCL "
            "takes those and the first barrier waits until the timeout. NCCL_NET=Socket for all "
            "ranks avoids that and puts every group on sockets."
        )
