"""A peer case as hetplan's inputs: which model, cluster and job are the same question?

float32, AdamW, no recomputation, no interleaving, one pipeline, nothing sharded, as Sailor's plans
are; one island per GPU and zone, and links that name their path in Sailor's fits. The target is
flagscale: stages that differ in tp and dp, as Sailor's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from evaluation.sailor_plan_file import NAMES
from hetplan.benchmarks.search.cases import Case, SailorRoom
from hetplan.benchmarks.search.sailor_cost import MEMORY_BYTES
from hetplan.benchmarks.search.sailor_files import SailorFiles
from hetplan.benchmarks.search.sailor_predictor import path_name
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Pins, Precision, TrainerOptions
from hetplan.lint.known import known_model
from hetplan.model.spec import ModelSpec
from hetplan.search.result import Inputs

TARGET = "flagscale"
_MESSAGE_BYTES = 8e6
"""Size of the message whose rate stands in a link: activations of one sequence of OPT-350."""
_NO_PATH_BYTES_PER_SECOND = 1e3
"""No plan that Sailor's formula can price has such a path: it disqualifies them."""
_GIB = dict(MEMORY_BYTES)
_KINDS = {name: kind for kind, name in NAMES}


def case_inputs(case: Case, files: SailorFiles) -> Inputs:
    """Model, cluster and job of a case; an InputError for a model or GPU that is not known."""
    return Inputs(
        model=_model(case),
        cluster=_cluster(case, files),
        job=Job(
            name=case.name,
            global_batch_size=case.global_batch_size,
            sequence_length=case.sequence_length,
            precision=Precision.FLOAT32,
            optimizer=Optimizer.ADAMW,
            target=TARGET,
            # The head-room of Sailor's own memory rule is in its fixed 2 or 3 GB.
            memory_reserve_fraction=0.0,
            gradient_clipping=False,
            # The least memory: what fits is judged by Sailor's own rule (candidates), which
            # measured activations decide; hetplan's must not exclude more.
            trainer=TrainerOptions(
                fused_attention=True,
                attention_dropout=False,
                hidden_dropout=False,
                fused_loss=True,
                fused_accumulation=True,
            ),
            pin=Pins(
                recompute=False,
                cp=1,
                ep=1,
                virtual_stages=1,
                sequence_parallel=False,
                sharded_optimizer=False,
                pipelines=1,
                depth=0,
            ),
        ),
        sha256=(),
    )


def _model(case: Case) -> ModelSpec:
    model = known_model(case.model)
    if model is None:
        raise InputError(f"case {case.name}: the shape of model {case.model} is not known")
    missing = case.num_layers - len(model.layers)
    if abs(missing) > 1 or len(model.layer_runs) != 1:
        raise InputError(
            f"case {case.name}: model_layers is {case.num_layers}; {case.model} has "
            f"{len(model.layers)} with embedding and head"
        )
    if missing:
        # Profiles of LLAMA-3-8 have the norm before the head as a layer.
        (run,) = model.layer_runs
        return replace(model, layer_runs=(replace(run, count=run.count + missing),))
    return model


def _cluster(case: Case, files: SailorFiles) -> Cluster:
    islands = [(room, room_island(case, room, files)) for room in case.rooms]
    return rooms_cluster(case.name, islands, files)


def rooms_cluster(
    name: str, islands: Sequence[tuple[SailorRoom, Island]], files: SailorFiles
) -> Cluster:
    """Islands, each in its room, and the links between them."""
    links = tuple(
        IslandLink(between=(one.name, other.name), link=_link(room, to_room, files))
        for (room, one), (to_room, other) in combinations(islands, 2)
    )
    return Cluster(name=name, islands=tuple(island for _, island in islands), links=links)


def room_island(case: Case, room: SailorRoom, files: SailorFiles) -> Island:
    """All devices of a room; an InputError for a GPU that is not known."""
    kind = _KINDS.get(room.gpu)
    device = next((each for each in load_catalogue() if each.kind == kind), None)
    if device is None:
        known = ", ".join(_KINDS)
        raise InputError(f"case {case.name}: GPU {room.gpu} is not known; known: {known}")
    return Island(
        name=f"{room.gpu}-{room.zone}",
        region=room.zone,
        device=device,
        nodes=room.devices // case.devices_per_node,
        devices_per_node=case.devices_per_node,
        # Its collectives stand in the profiles: any rate will do.
        intra_node=Link(
            bandwidth_bytes_per_second=100e9,
            latency_seconds=0.0,
            transport=Transport.DEVICE_DIRECT,
            measured=True,
        ),
        inter_node=_link(room, room, files),
        memory_bytes=_GIB[room.gpu] * 1024**3,
    )


def _link(one: SailorRoom, other: SailorRoom, files: SailorFiles) -> Link:
    """The path's rate; next to none where Sailor's files have no such path."""
    ends = (one.zone, one.gpu), (other.zone, other.gpu)
    try:
        seconds = files.fit((*ends[0], 1), (*ends[1], 1)).seconds(_MESSAGE_BYTES)
    except InputError:
        rate, samples = _NO_PATH_BYTES_PER_SECOND, None
    else:
        rate, samples = _MESSAGE_BYTES / seconds, path_name(*ends)
    return Link(
        bandwidth_bytes_per_second=rate,
        latency_seconds=0.0,
        transport=Transport.DEVICE_DIRECT,
        samples=samples,
        measured=True,
    )
