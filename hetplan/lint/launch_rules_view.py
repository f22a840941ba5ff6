"""A launch as the rules ask it: sizes by name, each a number, a default, or not known.

Megatron-LM and FlagScale have the same names (FlagScale turns every leaf of its `train` mapping
into the flag of that name: flagscale/runner/runner_train.py), so a setting is found by its last
part with dashes. A size whose value only the host's environment knows (`$TP`) is not known: rules
that need it say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.importers.launches.values import LaunchFacts, LaunchHost, LaunchText, Setting
from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Check, Finding, Rule, Severity, finding
from hetplan.lint.rows import LaunchRow, Place
from hetplan.model.spec import ModelSpec

MEGATRON_LIKE = ("megatron", "flagscale")
_OFF = ("false", "none", "null", "no")
_TORCHRUN = "torchrun."
_MANY = re.compile(r"\$\W*\w*(ARG|OPT|EXTRA|FLAG)", re.IGNORECASE)
"""Names of variables that hold flags, not a value."""
_AROUND = (_TORCHRUN, "srun.", "sbatch.", "experiment.")
"""Before names of settings that are not the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One thing that a rule found: where it stands, and what it is."""

    settings: tuple[Setting | None, ...]
    """What shows it; None and empty: nothing that is written, the whole launch does."""
    found: str


def seen(found: str, *settings: Setting | None) -> Seen:
    """What was found, and the settings that show it."""
    return Seen(settings=settings, found=found)


@dataclass(kw_only=True)
class Launch:
    """One launch, with its sizes by name."""

    row: LaunchRow

    @property
    def text(self) -> LaunchText:
        """The launch as it was written."""
        return self.row.text

    @property
    def facts(self) -> LaunchFacts | None:
        """What it asks of its trainer; None: not known."""
        return self.row.facts

    @property
    def cluster(self) -> Cluster | None:
        """Where it runs; None: not known."""
        return self.row.cluster

    @property
    def model(self) -> ModelSpec | None:
        """What it trains; None: not known."""
        return self.row.model

    @property
    def is_megatron_like(self) -> bool:
        """Whether Megatron-LM's names and rules hold."""
        return self.text.trainer in MEGATRON_LIKE

    @cached_property
    def by_name(self) -> dict[str, tuple[Setting, ...]]:
        """Settings by their last part with dashes, in order."""
        found: dict[str, list[Setting]] = {}
        for each in self.text.settings:
            if is_of_trainer(each):
                found.setdefault(leaf(each.name), []).append(each)
        return {name: tuple(settings) for name, settings in found.items()}

    @cached_property
    def unread_names(self) -> frozenset[str]:
        """Names of settings whose value only the hosts know."""
        return frozenset(leaf(each.name) for each in self.text.unread)

    @cached_property
    def is_open(self) -> bool:
        """Whether flags may be added that stand in no file, as by `$EXTRA_ARGS`."""
        return any(
            not each.name or any(_MANY.search(value) for value in each.values)
            for each in self.text.unread
        )

    @property
    def program(self) -> Setting | None:
        """The script or module that is started; None for a file of nothing but arguments."""
        return next((each for each in self.text.settings if each.name == "program"), None)

    def get(self, name: str) -> Setting | None:
        """The setting of this flag that counts; None where it is not written."""
        settings = self.by_name.get(name)
        return settings[-1] if settings else None

    def has(self, name: str) -> bool:
        """Whether the flag is set: it is written, and not as `false`."""
        found = self.get(name)
        return found is not None and not (found.values and found.values[0].lower() in _OFF)

    def may_have(self, name: str) -> bool:
        """Whether the flag is set, or may be by words that only the hosts know."""
        return self.has(name) or name in self.unread_names or self.is_open

    def word(self, name: str) -> str | None:
        """The flag's value as it is written; None: not written, or not known."""
        found = self.get(name)
        if found is None or name in self.unread_names or not found.values:
            return None
        return None if found.values[0].lower() in _OFF else found.values[0]

    def number(self, name: str, default: int | None = None) -> int | None:
        """The flag's whole number; `default` where it is not written; None where not known."""
        if self.get(name) is None:
            return None if name in self.unread_names else default
        word = self.word(name)
        return whole(word) if word is not None else default if not self.has(name) else None

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """The flag's list of whole numbers; None: not written, or not known."""
        found = self.get(name)
        if found is None or name in self.unread_names or not self.has(name):
            return None
        words = " ".join(found.values).replace(",", " ").strip("[] ").split()
        values = [whole(word.strip("'\"")) for word in words]
        return tuple(value for value in values if value is not None) if all_known(values) else None

    def words(self, name: str) -> tuple[str, ...] | None:
        """The flag's list of words; None: not written, or not known."""
        found = self.get(name)
        if found is None or name in self.unread_names or not self.has(name):
            return None
        return tuple(word.strip("[]'\" ,") for word in " ".join(found.values).split())

    @property
    def tp(self) -> int | None:
        """Tensor-parallel degree of every stage."""
        return self.number(self._name("tensor-model-parallel-size", "tensor-parallel-degree"), 1)

    @property
    def pp(self) -> int | None:
        """Pipeline stages."""
        return self.number(
            self._name("pipeline-model-parallel-size", "pipeline-parallel-degree"), 1
        )

    @property
    def cp(self) -> int | None:
        """Context-parallel degree."""
        return self.number(self._name("context-parallel-size", "context-parallel-degree"), 1)

    @property
    def ep(self) -> int | None:
        """Expert-parallel degree."""
        return self.number(self._name("expert-model-parallel-size", "expert-parallel-degree"), 1)

    @property
    def is_hetero(self) -> bool:
        """Whether FlagScale's meshes, not one set of degrees, hold."""
        return self.text.trainer == "flagscale" and self.has("enable-hetero")

    @property
    def num_layers(self) -> int | None:
        """Transformer layers, as the launch says or the model has."""
        if not self.is_megatron_like:
            return self.model.num_layers if self.model is not None else None
        return self.number("num-layers")

    def torchrun(self, *names: str) -> Setting | None:
        """An option of torchrun by any of its names; None where it is not written or not known."""
        return _torchrun(self.text.settings, names)

    def torchrun_written(self, *names: str) -> Setting | None:
        """The same, with options whose value only the hosts know."""
        return _torchrun((*self.text.unread, *self.text.settings), names)

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
    def ranks_of_hosts(self) -> tuple[tuple[str, int], ...] | None:
        """(name, ranks) of each host in the order of ranks; None: not known."""
        devices, hosts, order = self.host_devices, self.text.hosts, self.host_order
        if devices is None or not hosts or order is None:
            return None
        return tuple((hosts[at].name, devices[at]) for at in order)

    @property
    def host_order(self) -> tuple[int, ...] | None:
        """Places of the hosts in the order of ranks; None: not known.

        FlagScale sorts hosts by the first place of their type (RankMapper); others keep the order.
        """
        hosts = self.text.hosts
        if not self.is_hetero or not any(host.type for host in hosts):
            return tuple(range(len(self.host_devices or ())))
        types = self.words("hetero-device-types")
        if types is None or any(host.type not in types for host in hosts):
            return None
        places = range(len(hosts))
        return tuple(sorted(places, key=lambda at: (types.index(hosts[at].type), at)))

    @property
    def world_size(self) -> int | None:
        """Ranks of all hosts; None: not known."""
        return sum(self.host_devices) if self.host_devices else None

    @property
    def dp(self) -> int | None:
        """Data-parallel degree; None: not known, or it differs between stages."""
        if self.is_hetero:
            return None
        world, sizes = self.world_size, (self.tp, self.pp, self.cp)
        model = product(sizes)
        if world is None or model is None or world % model:
            return None
        return world // model

    def _name(self, megatron: str, torchtitan: str) -> str:
        return megatron if self.is_megatron_like else torchtitan


def _torchrun(settings: tuple[Setting, ...], names: tuple[str, ...]) -> Setting | None:
    wanted = [each for each in settings if each.name.startswith(_TORCHRUN)]
    return next((each for each in reversed(wanted) if leaf(each.name) in names), None)


Look: TypeAlias = Callable[[Launch], Iterable[Seen]]


def launch_rule(
    *, id: str, severity: Severity, title: str, explanation: str, advice: str, look: Look
) -> Rule:
    """A rule that looks at every launch by itself."""
    return Rule(
        id=id,
        severity=severity,
        title=title,
        explanation=explanation,
        advice=advice,
        check=_check(look),
    )


def _check(look: Look) -> Check:
    def check(evidence: Evidence) -> Iterator[Finding]:
        # Launches that include one file share what is wrong in it.
        yield from dict.fromkeys(
            _finding(row, each)
            for row in evidence.inputs.launches
            for each in look(Launch(row=row))
        )

    return check


def _finding(row: LaunchRow, what: Seen) -> Finding:
    settings = [each for each in what.settings if each is not None and each.file]
    file = settings[0].file if settings else row.file
    places = [Place(file=file, line=each.line) for each in settings if each.file == file]
    return finding(places or [Place(file=row.file, line=0)], what.found, count=1)


def leaf(name: str) -> str:
    """Last part of a dotted name, with dashes."""
    return name.rpartition(".")[2].replace("_", "-")


def is_of_trainer(setting: Setting) -> bool:
    """Whether the setting is the trainer's own, not that of what starts it."""
    return not setting.name.startswith(_AROUND) and setting.name != "program"


def whole(word: str) -> int | None:
    """The whole number that the word is; None where it is none."""
    digits = word.removeprefix("-")
    return int(word) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else None


def all_known(values: Iterable[int | None]) -> bool:
    """Whether every value is known."""
    return all(value is not None for value in values)


def product(values: Iterable[int | None]) -> int | None:
    """Their product; None where one is not known or below 1."""
    result = 1
    for value in values:
        if value is None or value < 1:
            return None
        result *= value
    return result


def host_name(hosts: tuple[LaunchHost, ...], at: int) -> str:
    """Name of the host at this place, or its number where hosts have none."""
    return hosts[at].name if at < len(hosts) and hosts[at].name else f"host {at}"
