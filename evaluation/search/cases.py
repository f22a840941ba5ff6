"""Which questions were other planners asked, and what did they answer?

A file of cases (peers/sailor_cases.json of the reference folder, or `--cases FILE`):

    {"cases": [{"case", "model", "global_batch_size", "sequence_length", "model_layers",
                "devices_per_node", "devices_by_kind_and_zone": {GPU: {zone: devices}},
                "planners": [{"planner", "step_seconds_by_sailor_simulator", "search_cpu_seconds",
                              "microbatch_size",
                              "plan": {"layers", "dp", "stages": [{"GPU tpN zone": replicas}]}}]}]}

`planners` may be empty. `planner_construction_cpu_seconds` of the file, a number by planner, is
what building a planner takes; Sailor's 2.2 s stand in for it where the file has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.json_values import Value, read_tree, tidy
from evaluation.search.sailor_cost import SailorPlan, SailorReplicas
from hetplan.errors import InputError
from hetplan.files.reading import read_text

USUAL_FILE = Path("peers") / "sailor_cases.json"
CONSTRUCTION_SECONDS = (("Sailor", 2.2),)
"""CPU seconds that a planner takes before its search: the `what` of the file of cases says 2.2 to
2.5 of Sailor; the smaller one."""
_FILE_KEYS = ("source", "what", "planner_construction_cpu_seconds", "cases")
_CASE_KEYS = (
    "case", "cluster", "model", "model_layers", "global_batch_size", "sequence_length",
    "devices_per_node", "devices_by_kind_and_zone", "planners",
)  # fmt: skip
_PEER_KEYS = (
    "planner", "microbatch_size", "search_cpu_seconds", "step_seconds_by_sailor_simulator", "plan",
)  # fmt: skip
_PLAN_KEYS = ("layers", "stages", "pp", "dp")
"""What a file may have; `source`, `what`, `cluster`, `pp` and `dp` are for its readers."""
_PLACE = re.compile(r"(\S+) tp([1-9]\d{0,3}) (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """What one planner answered."""

    planner: str
    said_seconds: float
    """Step by Sailor's simulator, as the file has it."""
    search_cpu_seconds: float
    construction_cpu_seconds: float
    plan: SailorPlan

    @property
    def cpu_seconds(self) -> float:
        """Construction and search."""
        return self.search_cpu_seconds + self.construction_cpu_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorRoom:
    """Devices of one GPU in one zone."""

    gpu: str
    zone: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question."""

    name: str
    model: str
    global_batch_size: int
    sequence_length: int
    num_layers: int
    """With embedding and head."""
    devices_per_node: int
    rooms: tuple[SailorRoom, ...]
    peers: tuple[PeerPlan, ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(room.gpu for room in self.rooms))

    @property
    def zones(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(room.zone for room in self.rooms))


def read_cases(path: Path) -> tuple[Case, ...]:
    """Every case of a file; an InputError with line and field for what is wrong."""
    root = read_tree(read_text(path), str(path))
    _only(root, _FILE_KEYS)
    construction = dict(CONSTRUCTION_SECONDS)
    given = root.get("planner_construction_cpu_seconds")
    if given is not None:
        construction |= {name: value.number() for name, value in given.items()}
    cases = tuple(_case(value, construction) for value in root.need("cases").entries())
    if not cases:
        raise root.refuse("there is no case; list at least one")
    return cases


def _case(value: Value, construction: dict[str, float]) -> Case:
    _only(value, _CASE_KEYS)
    per_node = _count(value.need("devices_per_node"))
    rooms = tuple(
        SailorRoom(gpu=gpu, zone=zone, devices=number)
        for gpu, zones in value.need("devices_by_kind_and_zone").items()
        for zone, devices in zones.items()
        # Sailor's own quotas name kinds of which there are none.
        if (number := _count_or_none(devices)) > 0
    )
    if not rooms:
        raise value.refuse("devices_by_kind_and_zone names no devices")
    for room in rooms:
        if room.devices % per_node:
            raise value.refuse(
                f"{room.devices} {room.gpu} in {room.zone} are no whole nodes of {per_node}"
            )
    peers = value.get("planners")
    return Case(
        name=value.need("case").text(),
        model=value.need("model").text(),
        global_batch_size=_count(value.need("global_batch_size")),
        sequence_length=_count(value.need("sequence_length")),
        num_layers=_count(value.need("model_layers")),
        devices_per_node=per_node,
        rooms=rooms,
        peers=tuple(_peer(each, per_node, construction) for each in peers.entries())
        if peers is not None
        else (),
    )


def _peer(value: Value, per_node: int, construction: dict[str, float]) -> PeerPlan:
    _only(value, _PEER_KEYS)
    planner = value.need("planner").text()
    plan = value.need("plan")
    _only(plan, _PLAN_KEYS)
    return PeerPlan(
        planner=planner,
        said_seconds=value.need("step_seconds_by_sailor_simulator").positive(),
        search_cpu_seconds=value.need("search_cpu_seconds").number(),
        construction_cpu_seconds=construction.get(planner, 0.0),
        plan=SailorPlan(
            layers=tuple(_count(each) for each in plan.need("layers").entries()),
            stages=tuple(
                tuple(_replicas(stage, key, count, per_node) for key, count in stage.items())
                for stage in plan.need("stages").entries()
            ),
            microbatch_size=_count(value.need("microbatch_size")),
        ),
    )


def _replicas(stage: Value, key: str, count: Value, per_node: int) -> SailorReplicas:
    found = _PLACE.fullmatch(key)
    if found is None:
        raise stage.refuse(f"found the key {key[:80]!a}; `GPU tpN zone` is expected")
    return SailorReplicas(
        gpu=found[1], tp=int(found[2]), zone=found[3], devices_per_node=per_node,
        count=_count(count),
    )  # fmt: skip


def _only(value: Value, known: tuple[str, ...]) -> None:
    """Refuse the first key that is none of these: a misspelt one would count as absent."""
    for key, given in value.items():
        if key not in known:
            raise given.refuse(f"unknown key {tidy(key)}; known: {', '.join(known)}")


def _count_or_none(value: Value) -> int:
    """A count that may be 0."""
    return 0 if value.number() == 0 else _count(value)


def _count(value: Value) -> int:
    number = value.positive()
    if number != int(number) or number > 1e9:
        raise value.refuse(f"found {number:g}; a whole number is expected")
    return int(number)


def check_cases(cases: tuple[Case, ...]) -> None:
    """An InputError where two cases have one name."""
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"several cases are named {', '.join(twice)}")
