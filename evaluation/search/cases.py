"""Cases that other planners answered, and each case as hetplan's inputs.

A file of cases (peers/sailor_cases.json of the reference folder, or `--cases FILE`):

    {"cases": [{"case", "model", "global_batch_size", "sequence_length", "model_layers",
                "devices_per_node", "devices_by_kind_and_zone": {GPU: {zone: devices}},
                "planners": [{"planner", "step_seconds_by_sailor_simulator", "search_cpu_seconds",
                              "microbatch_size",
                              "plan": {"layers", "dp", "stages": [{"GPU tpN zone": replicas}]}}]}]}

`planners` may be empty. `planner_construction_cpu_seconds` of the file, a number by planner, is
what building a planner takes; Sailor's 2.2 s stand in for it where the file has none.

As hetplan's inputs: float32, AdamW, no recomputation, no interleaving, one pipeline, nothing
sharded, as Sailor's plans are; one island per GPU and zone, and links that name their path in
Sailor's fits. The target is flagscale: stages that differ in tp and dp, as Sailor's do.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from evaluation.accuracy.unit_layers import known_model
from evaluation.search.sailor import (
    MEMORY_BYTES,
    NAMES,
    SailorFiles,
    SailorPlan,
    SailorReplicas,
    path_name,
)
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.job.spec import Job, Optimizer, Pins, Precision, TrainerOptions
from hetplan.model.spec import ModelSpec
from hetplan.search.result import Inputs

USUAL_FILE = Path("peers") / "sailor_cases.json"
CONSTRUCTION_SECONDS = {"Sailor": 2.2}
"""CPU seconds that a planner takes before its search: the `what` of the file of cases says 2.2 to
2.5 of Sailor; the smaller one."""
_PLACE = r"(\S+) tp([1-9]\d{0,3}) (\S+)"


class _Form(BaseModel):
    """What a file may have; `source`, `what`, `cluster`, `pp` and `dp` are for its readers."""

    model_config = ConfigDict(extra="forbid")


class _PlanForm(_Form):
    layers: list[PositiveInt]
    stages: list[dict[Annotated[str, Field(pattern=f"^{_PLACE}$")], PositiveInt]]
    pp: Any = None
    dp: Any = None


class PeerPlan(_Form):
    """What one planner answered."""

    planner: str
    step_seconds_by_sailor_simulator: PositiveFloat
    search_cpu_seconds: float
    construction_cpu_seconds: float = 0.0
    microbatch_size: PositiveInt
    plan: _PlanForm

    @property
    def cpu_seconds(self) -> float:
        """Construction and search."""
        return self.search_cpu_seconds + self.construction_cpu_seconds

    def sailor_plan(self, case: Case) -> SailorPlan:
        """In Sailor's form."""
        return SailorPlan(
            layers=tuple(self.plan.layers),
            stages=tuple(
                tuple(
                    SailorReplicas(
                        gpu=gpu,
                        tp=int(tp),
                        zone=zone,
                        devices_per_node=case.devices_per_node,
                        count=count,
                    )
                    for key, count in stage.items()
                    for gpu, tp, zone in re.findall(_PLACE, key)
                )
                for stage in self.plan.stages
            ),
            microbatch_size=self.microbatch_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorRoom:
    """Devices of one GPU in one zone."""

    gpu: str
    zone: str
    devices: int


class Case(_Form):
    """One question."""

    name: str = Field(alias="case")
    cluster: Any = None
    model: str
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    num_layers: PositiveInt = Field(alias="model_layers")
    """With embedding and head."""
    devices_per_node: PositiveInt
    devices_by_kind_and_zone: dict[str, dict[str, NonNegativeInt]]
    planners: list[PeerPlan] = []

    @model_validator(mode="after")
    def _whole_nodes(self) -> Case:
        if not self.rooms:
            raise ValueError(f"case {self.name}: no devices in devices_by_kind_and_zone")
        for room in self.rooms:
            if room.devices % self.devices_per_node:
                raise ValueError(
                    f"case {self.name}: {room.devices} {room.gpu} in {room.zone} are no whole "
                    f"nodes of {self.devices_per_node}"
                )
        return self

    @property
    def rooms(self) -> tuple[SailorRoom, ...]:
        """Where there are devices: Sailor's own quotas name kinds of which there are none."""
        return tuple(
            SailorRoom(gpu=gpu, zone=zone, devices=devices)
            for gpu, zones in self.devices_by_kind_and_zone.items()
            for zone, devices in zones.items()
            if devices
        )

    @property
    def gpus(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(room.gpu for room in self.rooms))

    @property
    def zones(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(room.zone for room in self.rooms))


class _FileForm(_Form):
    source: Any = None
    what: Any = None
    planner_construction_cpu_seconds: dict[str, float] = {}
    cases: list[Case] = Field(min_length=1)


def read_cases(path: Path) -> tuple[Case, ...]:
    """Every case of a file; an InputError with the field for what is wrong."""
    try:
        form = _FileForm.model_validate_json(read_text(path))
    except ValidationError as error:
        faults = [
            Fault(file=str(path), field=".".join(map(str, each["loc"])), message=str(each["msg"]))
            for each in error.errors()
        ]
        raise InputError(*faults) from None
    construction = CONSTRUCTION_SECONDS | form.planner_construction_cpu_seconds
    for case in form.cases:
        for peer in case.planners:
            peer.construction_cpu_seconds = construction.get(peer.planner, 0.0)
    twice = [name for name, count in Counter(case.name for case in form.cases).items() if count > 1]
    if twice:
        raise InputError(f"several cases are named {', '.join(sorted(twice))}")
    return tuple(form.cases)


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
    islands = [(room, _island(case, room, files)) for room in case.rooms]
    links = tuple(
        IslandLink(between=(one.name, other.name), link=_link(room, to_room, files))
        for (room, one), (to_room, other) in combinations(islands, 2)
    )
    return Cluster(name=case.name, islands=tuple(island for _, island in islands), links=links)


def _island(case: Case, room: SailorRoom, files: SailorFiles) -> Island:
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
