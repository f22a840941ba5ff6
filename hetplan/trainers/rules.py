"""Rules about launches: what a launch is for them, and the checks of every trainer.

A rule sees sizes by flag name; a size whose value only the host knows (`$TP`) is None, and rules
that need it report nothing. Megatron-LM and FlagScale have the same names (FlagScale turns every
leaf of its `train` mapping into the flag of that name: flagscale/runner/runner_train.py).

Ranks count tensor parallelism first, then context, data, and pipeline parallelism last (Megatron-LM
core/parallel_state.py, order tp-cp-ep-dp-pp; torchtitan distributed/parallel_dims.py), so a
tensor-parallel group is tp consecutive ranks, wherever a host ends. torchrun numbers hosts by
--node-rank with static rendezvous only (torch/distributed/run.py); others sort the hosts that join
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.model.spec import ModelSpec
from hetplan.trainers.launch_values import LaunchFacts, LaunchText, Setting, ValueNotGivenError
from hetplan.trainers.read import facts_of
from hetplan.units import format_bytes

_OFF = ("false", "none", "null", "no")
_MANY = re.compile(r"\$\W*\w*(ARG|OPT|EXTRA|FLAG)", re.IGNORECASE)
"""Names of variables that hold flags, not a value."""
_MAX_SHOWN = 3
_OF_THE_BATCH = (
    "global-batch-size",
    "micro-batch-size",
    "local-batch-size",
    "num-pp-microbatches",
    "pipeline-model-parallel-size",
    "pipeline-parallel-degree",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One place where a launch breaks a rule."""

    settings: tuple[Setting, ...]
    """The settings that show it; empty: the whole launch does."""
    found: str


def violation(found: str, *settings: Setting | None) -> Violation:
    """What was found, and the settings that show it; None is a setting that is not written."""
    return Violation(settings=tuple(each for each in settings if each is not None), found=found)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch, with its sizes by name, and what is known of where and what it trains."""

    file: str
    """The file that was read."""
    text: LaunchText
    facts: LaunchFacts | None = None
    """None: a size that they need is in no file, or sizes do not fit each other."""
    cluster: Cluster | None = None
    """Where it runs; None: not known."""
    model: ModelSpec | None = None
    """What it trains; None: not known."""

    @property
    def is_megatron_like(self) -> bool:
        """Whether Megatron-LM's names and rules hold."""
        return self.text.trainer in ("megatron", "flagscale")

    @cached_property
    def by_name(self) -> dict[str, tuple[Setting, ...]]:
        """Settings of the trainer by flag name, in order."""
        by_name: dict[str, list[Setting]] = {}
        for setting in self.text.settings:
            if setting.is_of_trainer:
                by_name.setdefault(setting.flag, []).append(setting)
        return {name: tuple(settings) for name, settings in by_name.items()}

    @cached_property
    def unread_names(self) -> frozenset[str]:
        """Flag names whose value only the hosts know."""
        return frozenset(setting.flag for setting in self.text.unread)

    @cached_property
    def is_open(self) -> bool:
        """Whether more flags may be added that are in no file, as by `$EXTRA_ARGS`."""
        return any(
            not setting.name or any(_MANY.search(value) for value in setting.values)
            for setting in self.text.unread
        )

    def get(self, name: str) -> Setting | None:
        """The setting of this flag that counts; None where it is not written."""
        settings = self.by_name.get(name)
        return settings[-1] if settings else None

    def has(self, name: str) -> bool:
        """Whether the flag is written, and not as `false`."""
        setting = self.get(name)
        return setting is not None and not (setting.values and setting.values[0].lower() in _OFF)

    def may_have(self, name: str) -> bool:
        """Whether the flag is set, or may be by words that only the hosts know."""
        return self.has(name) or name in self.unread_names or self.is_open

    def word(self, name: str) -> str | None:
        """The flag's value as it is written; None: not written, or not known."""
        setting = self.get(name)
        if setting is None or name in self.unread_names or not setting.values:
            return None
        return None if setting.values[0].lower() in _OFF else setting.values[0]

    def number(self, name: str, default: int | None = None) -> int | None:
        """The flag's whole number; `default` where it is not written; None where not known."""
        if self.get(name) is None:
            return None if name in self.unread_names else default
        word = self.word(name)
        return whole(word) if word is not None else default if not self.has(name) else None

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """The flag's list of whole numbers; None: not written, or not known."""
        words = self.words(name)
        values = [whole(word) for word in words or () if word]
        known = tuple(value for value in values if value is not None)
        return known if words is not None and len(known) == len(values) else None

    def words(self, name: str) -> tuple[str, ...] | None:
        """The flag's list of words; None: not written, or not known."""
        setting = self.get(name)
        if setting is None or name in self.unread_names or not self.has(name):
            return None
        text = " ".join(setting.values).replace(",", " ")
        return tuple(word.strip("[]'\" ") for word in text.split())

    @property
    def tp(self) -> int | None:
        """Tensor-parallel degree of every stage."""
        return self._degree("tensor-model-parallel-size", "tensor-parallel-degree")

    @property
    def pp(self) -> int | None:
        """Pipeline stages."""
        return self._degree("pipeline-model-parallel-size", "pipeline-parallel-degree")

    @property
    def cp(self) -> int | None:
        """Context-parallel degree."""
        return self._degree("context-parallel-size", "context-parallel-degree")

    def _degree(self, megatron: str, torchtitan: str) -> int | None:
        return self.number(megatron if self.is_megatron_like else torchtitan, 1)

    @property
    def is_hetero(self) -> bool:
        """Whether FlagScale's meshes hold, not one set of degrees."""
        return self.text.trainer == "flagscale" and self.has("enable-hetero")

    @cached_property
    def meshes(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """(tp, cp, ep, dp, pp) of each of FlagScale's meshes; empty where they are not whole."""
        numbers = self.numbers("hetero-process-meshes") or ()
        if not self.is_hetero or len(numbers) % 5 or min(numbers, default=0) < 1:
            return ()
        rows = (numbers[at : at + 5] for at in range(0, len(numbers), 5))
        return tuple((tp, cp, ep, dp, pp) for tp, cp, ep, dp, pp in rows)

    @property
    def num_layers(self) -> int | None:
        """Transformer layers, as the launch says or the model has."""
        if not self.is_megatron_like:
            return self.model.num_layers if self.model is not None else None
        return self.number("num-layers")

    def torchrun(self, name: str, *, unread: bool = False) -> Setting | None:
        """An option of torchrun; `unread`: also one whose value only the hosts know."""
        settings = (*self.text.unread, *self.text.settings) if unread else self.text.settings
        matching = (
            each
            for each in reversed(settings)
            if each.name.startswith(("torchrun.", "experiment.runner.")) and each.flag == name
        )
        return next(matching, None)

    @cached_property
    def host_devices(self) -> tuple[int, ...] | None:
        """Ranks of each host in the order of node ranks; None: not known."""
        if self.text.hosts:
            devices = [host.devices or self.text.devices_per_node for host in self.text.hosts]
            return tuple(each for each in devices if each) if all(devices) else None
        if self.text.nodes and self.text.devices_per_node:
            return (self.text.devices_per_node,) * self.text.nodes
        return None

    @property
    def host_order(self) -> tuple[int, ...] | None:
        """Indices of the hosts in the order of ranks; None: not known.

        FlagScale sorts hosts by the first place of their type (RankMapper); others keep the order.
        """
        hosts = self.text.hosts
        if not self.is_hetero or not any(host.type for host in hosts):
            return tuple(range(len(self.host_devices or ())))
        types = self.words("hetero-device-types")
        if types is None or any(host.type not in types for host in hosts):
            return None
        return tuple(sorted(range(len(hosts)), key=lambda at: (types.index(hosts[at].type), at)))

    @property
    def world_size(self) -> int | None:
        """Ranks of all hosts; None: not known."""
        return sum(self.host_devices) if self.host_devices else None

    @property
    def dp(self) -> int | None:
        """Data-parallel degree; None: not known, or it differs between stages."""
        world, (tp, pp, cp) = self.world_size, (self.tp, self.pp, self.cp)
        if self.is_hetero or not world or not tp or not pp or not cp:
            return None
        copies, rest = divmod(world, tp * pp * cp)
        return None if rest else copies


Check: TypeAlias = tuple[str, Callable[[Launch], Iterable[Violation]]]
"""A rule of `hetplan/lint/rules.yaml`, and a function that finds where a launch breaks it."""


def whole(word: str) -> int | None:
    """The whole number of a word; None where it has another form."""
    digits = word.removeprefix("-")
    return int(word) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else None


# ---- rules of every trainer


def _refused(launch: Launch) -> Iterator[Violation]:
    """What reading the launch's sizes finds wrong; values that it does not give are left out."""
    try:
        facts_of(launch.text, None if launch.model is None else launch.model.num_layers)
    except ValueNotGivenError:
        return
    except InputError as error:
        for fault in error.faults:
            setting = Setting(name=fault.field, values=(), file=fault.file, line=fault.line)
            # The rule of torchtitan's lists needs no number of ranks.
            if setting.flag != "module-fqns-per-model-part":
                yield violation(fault.message, setting)


def _few_microbatches(launch: Launch) -> Iterator[Violation]:
    facts = launch.facts
    grows = ("rampup-batch-size", "step-batch-size-schedule")
    if facts is None or any(map(launch.may_have, grows)):
        return
    count, pp = facts.num_microbatches, facts.pp
    if 0 < count < pp:
        yield violation(
            f"{count} microbatch{'es' if count > 1 else ''} for {pp} stages: with equal stages "
            f"each device idles {(pp - 1) / (count + pp - 1):.0%} of the step; make a batch of "
            f"{2 * pp} microbatches or more, or fewer stages",
            *map(launch.get, _OF_THE_BATCH),
        )


def _spanning_groups(launch: Launch) -> Iterator[Violation]:
    """Tensor-parallel groups over several hosts."""
    devices, order = launch.host_devices, launch.host_order
    if devices is None or order is None:
        return
    hosts = [launch.text.hosts[at].name if launch.text.hosts else f"host {at}" for at in order]
    devices = tuple(devices[at] for at in order)
    meshes = [(tp, tp * cp * dp * pp) for tp, cp, _, dp, pp in launch.meshes]
    if not launch.is_hetero:
        meshes = [(launch.tp or 0, sum(devices))]
    first = 0
    for tp, count in meshes:
        split = list(_split_groups(first, count, tp, devices, hosts)) if tp > 1 else []
        first += count
        if not split:
            continue
        shown = "; ".join(
            f"ranks {start} to {start + tp - 1} lie on {' and '.join(names)}"
            for start, names in split[:_MAX_SHOWN]
        )
        more = f"; {len(split) - _MAX_SHOWN} more" if len(split) > _MAX_SHOWN else ""
        sizes = ", ".join(map(str, sorted(set(devices))))
        yield violation(
            f"{len(split)} of {count // tp} tensor-parallel groups span hosts of {sizes} devices: "
            f"{shown}{more}. Write a tp that divides the devices of every host "
            f"({math.gcd(*devices)} or a divisor of it)",
            launch.get("tensor-model-parallel-size") or launch.get("tensor-parallel-degree"),
            launch.get("hetero-process-meshes"),
            launch.torchrun("nproc-per-node"),
        )


def _split_groups(
    first: int, count: int, size: int, devices: tuple[int, ...], hosts: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """(first rank, hosts) of the groups of `size` ranks that are on several hosts."""
    ends = [*accumulate(devices)]
    for start in range(first, first + count - size + 1, size):
        names = [
            hosts[at]
            for at, end in enumerate(ends)
            if end > start and end - devices[at] < start + size
        ]
        # Several agents of one host are one host.
        if len(set(names)) > 1:
            yield start, names


def _disagreeing_hosts(launch: Launch) -> Iterator[Violation]:
    hosts, nodes = launch.text.hosts, launch.text.nodes
    nnodes, ranks = launch.torchrun("nnodes"), launch.torchrun("nproc-per-node")
    if hosts and nodes is not None and nodes != len(hosts):
        late = ": torchrun waits for hosts that nobody starts" if nodes > len(hosts) else ""
        yield violation(f"--nnodes {nodes}, and {len(hosts)} hosts{late}", nnodes)
    per_node = launch.text.devices_per_node
    small = [host for host in hosts if host.devices and per_node and host.devices < per_node]
    if small:
        yield violation(
            f"--nproc-per-node {per_node}, and {small[0].name} has {small[0].devices} devices",
            ranks,
        )
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and launch.text.trainer == "flagscale":
        yield violation(f"{twice[0]} is in the hostfile twice; FlagScale refuses it")
    cluster, world = launch.cluster, launch.world_size
    if cluster is not None and world is not None and world > cluster.num_devices:
        yield violation(
            f"{world} ranks, and {cluster.num_devices} devices in the cluster file", nnodes, ranks
        )


def _rendezvous(launch: Launch) -> Iterator[Violation]:
    backend = launch.torchrun("rdzv-backend")
    if backend is None or backend.values[:1] in ((), ("static",)):
        return
    nodes = len(launch.host_devices) if launch.host_devices else launch.text.nodes
    if nodes is not None and nodes < 2:
        return
    name, rank = backend.values[0], launch.torchrun("node-rank", unread=True)
    if launch.is_hetero:
        yield violation(
            f"rdzv_backend {name}: FlagScale's heterogeneous training supports static only; write "
            "rdzv_backend: static",
            backend,
        )
    elif rank is not None:
        yield violation(
            f"--rdzv-backend {name} ignores --node-rank: ranks go to hosts in an order of their "
            "own; write --rdzv-backend static with --master-addr and --master-port",
            backend,
            rank,
        )
    elif reason := _order_matters(launch):
        yield violation(
            f"--rdzv-backend {name} sorts hosts by itself, and this launch needs an order: "
            f"{reason}. Write --rdzv-backend static --node-rank N --master-addr ADDRESS "
            "--master-port PORT",
            backend,
        )


def _order_matters(launch: Launch) -> str:
    """Why it matters which host gets which ranks; empty: it does not."""
    devices, cluster = launch.host_devices, launch.cluster
    if devices and len(set(devices)) > 1:
        return "its hosts have unlike numbers of devices"
    if cluster is not None and len({island.device.kind for island in cluster.islands}) > 1:
        return "its cluster has several device kinds"
    if cluster is not None and len(cluster.islands) > 1 and launch.pp != 1:
        return "its stages are in several islands of its cluster"
    return ""


def _memory(launch: Launch) -> Iterator[Violation]:
    """Stages that do not fit, where model and cluster are known and the launch is a plan."""
    if launch.model is None or launch.cluster is None or launch.facts is None:
        return
    # Most launches come without a model, and the cost model takes half a second to import.
    from hetplan.cost.estimate import estimate
    from hetplan.predict.fit import FittedPredictor
    from hetplan.trainers.launch_plan import launch_plan

    try:
        planned = launch_plan(launch.text, launch.model, launch.cluster)
        # Memory needs no measurements.
        predictor = FittedPredictor.datasheet_only()
        priced = estimate(planned.plan, launch.model, launch.cluster, planned.job, predictor)
    except InputError:
        return  # sizes that do not fit each other have rules of their own
    uses = [stage.memory for stage in priced.stages]
    short = [at for at, use in enumerate(uses) if not use.fits]
    if not short:
        return
    at = max(short, key=lambda stage: uses[stage].total_bytes - uses[stage].available_bytes)
    names = (
        "pipeline-model-parallel-layout",
        "decoder-first-pipeline-num-layers",
        "hetero-pipeline-layer-split",
        "module-fqns-per-model-part",
        "num-layers",
    )
    yield violation(
        f"stage {at} with {sum(launch.facts.layers[at])} layers needs "
        f"{format_bytes(uses[at].total_bytes)} of the {format_bytes(uses[at].available_bytes)} "
        f"that its devices have left for plans; {len(short)} of {len(uses)} stages do not fit",
        *(launch.get(name) for name in names),
    )


CHECKS: tuple[Check, ...] = (
    ("launch-is-refused", _refused),
    ("launch-out-of-memory", _memory),
    ("launch-too-few-microbatches", _few_microbatches),
    ("launch-tp-across-hosts", _spanning_groups),
    ("launch-hosts-disagree", _disagreeing_hosts),
    ("launch-order-of-hosts", _rendezvous),
)
"""Of every trainer."""
