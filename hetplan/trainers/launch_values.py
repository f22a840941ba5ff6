"""A launch of a trainer: its settings as they are written, and what they ask for.

`LaunchText` holds the settings of a script, a list of arguments, a YAML or a TOML file, each with
its file and line. `LaunchFacts` holds what they mean, the trainer's defaults filled in. The getters
below read one setting and raise an InputError that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, shown, whole_number
from hetplan.job.spec import CollectiveAlgorithm, TrainerOptions
from hetplan.plans.plan import OverlapSettings, Recompute
from hetplan.units import counted

Given = tuple[tuple[str, str], ...]
"""(name, value) pairs of `--set`: variables of a script, or settings that override its own."""

GIVEN_FILE = "--set"
"""File name of settings that were given on hetplan's command line; they override all others."""
MAX_STAGES = 100_000
"""As many as a model has layers at most (`hetplan.model.spec.MAX_LAYERS`)."""
_MAX_RANKS = 1 << 21
ENVIRONMENT = "environment."
"""Prefix of variables of the ranks."""
_AROUND = ("torchrun.", "experiment.", ENVIRONMENT)
"""Prefixes of settings that belong to what starts the trainer."""


class ValueNotGivenError(InputError):
    """A value that the launch's files do not give: only the host knows it, or it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One flag, key or variable of a launch."""

    name: str
    """Without leading dashes: `tensor-model-parallel-size`; the dotted path of a YAML key."""
    values: tuple[str, ...]
    """Empty for a flag without value."""
    file: str
    line: int
    """1-based; 0 where no line can be named."""

    @property
    def flag(self) -> str:
        """The name as a flag: its last part, with dashes."""
        return self.name.rpartition(".")[2].replace("_", "-")

    @property
    def is_false(self) -> bool:
        """Whether the value switches the setting off."""
        return self.values in (("false",), ("null",), ("none",))

    @property
    def is_of_trainer(self) -> bool:
        """Whether the trainer gets it, not what starts it."""
        return not self.name.startswith(_AROUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHost:
    """One host of a hostfile."""

    name: str
    devices: int | None
    type: str = ""
    """FlagScale's device type; empty where the file has none."""
    local_devices: tuple[int, ...] = ()
    """Devices of the host in the order of its ranks; empty: 0 up to `devices`."""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText:
    """A launch as it is written."""

    trainer: str
    """megatron, flagscale or torchtitan."""
    settings: tuple[Setting, ...]
    """In order; of a flag that is given twice the last one counts."""
    hosts: tuple[LaunchHost, ...] = ()
    nodes: int | None = None
    """torchrun --nnodes; None: not given."""
    devices_per_node: int | None = None
    """torchrun --nproc-per-node; None: not given."""
    unread: tuple[Setting, ...] = ()
    """Settings whose value only the host knows, as `$TP`; under an empty name words that may stand
    for whole flags, as `$EXTRA_ARGS`."""
    remarks: tuple[str, ...] = ()
    """What of the files was left out, a line each with its place."""

    @property
    def file(self) -> str:
        """The launch's first file; empty where it has no setting."""
        return next((setting.file for setting in self.settings), "")

    def last(self, name: str) -> Setting | None:
        """The setting of this full name that counts; None where there is none."""
        return next((each for each in reversed(self.settings) if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMesh:
    """Stages of a launch that share degrees: all of them, or one mesh of FlagScale."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    microbatch_size: int
    etp: int = 1
    device_type: str = ""
    """FlagScale's; empty where it is not given."""

    @property
    def ranks(self) -> int:
        """Ranks of all its stages."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What a launch asks of its trainer, the trainer's defaults filled in."""

    text: LaunchText
    world_size: int
    meshes: tuple[LaunchMesh, ...]
    """In pipeline order; one, except for FlagScale."""
    layers: tuple[tuple[int, ...], ...]
    """Transformer layers of each stage, one number per virtual stage, as the trainer really places
    them (layers that it drops are missing)."""
    num_layers: int | None
    """As the launch gives it; None: it does not."""
    global_batch_size: int
    num_microbatches: int
    """Rounded down where the batch is not divisible."""
    sequence_length: int | None
    vocab_size: int | None
    """Before padding."""
    vocab_multiple: int
    sequence_parallel: bool
    sharded_optimizer: bool
    """Or more: `sharded_parameters`."""
    data_outermost: bool
    """Ranks count tp, cp, pp, dp."""
    precision: str
    tied_embeddings: bool | None
    """None: the launch does not say."""
    stage_recompute: tuple[Recompute, ...] = ()
    """Of each stage; empty: nothing is recomputed."""
    optimizer: str = "adamw"
    optimizer_instances: int = 1
    """Groups of data-parallel ranks that each keep a whole optimizer state."""
    optimizer_offload: float = 0.0
    sharded_parameters: bool = False
    """Gradients as well; all of it in every microbatch."""
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    schedule: str = "1f1b"
    """One of `hetplan.plans.plan.SCHEDULES`; interleaved-1f1b with virtual stages."""
    gradient_clipping: bool = True
    options: TrainerOptions = field(default_factory=TrainerOptions)
    """The trainer's own choices; None where the launch makes none."""
    refusals: tuple[Fault, ...] = ()
    """What the launch asks for and no plan has."""
    remarks: tuple[str, ...] = ()
    """What a plan has a little otherwise, a line each."""

    @property
    def virtual_stages(self) -> int:
        """Layer ranges of each stage."""
        return len(self.layers[0]) if self.layers else 1

    @property
    def pp(self) -> int:
        """Stages of all meshes."""
        return sum(mesh.pp for mesh in self.meshes)

    def title(self) -> str:
        """The launch in one line."""
        degrees = "; ".join(
            f"tp {mesh.tp}"
            + (f" cp {mesh.cp}" if mesh.cp > 1 else "")
            + (f" ep {mesh.ep}" if mesh.ep > 1 else "")
            + f" dp {mesh.dp} pp {mesh.pp}, microbatches of {mesh.microbatch_size}"
            for mesh in self.meshes
        )
        length = self.sequence_length if self.sequence_length is not None else "?"
        return (
            f"{self.text.trainer}: {counted(self.world_size, 'rank')}, {degrees}; "
            f"{counted(self.num_microbatches, 'microbatch', 'microbatches')}, "
            f"batch {self.global_batch_size} x {length} tokens"
        )


# ---- one setting


def flag(text: LaunchText, *names: str) -> Setting | None:
    """The setting that counts, under any of these flag names; None where it is missing or false.

    An InputError where only the host knows its value.
    """
    found = _last(text.settings, names)
    unknown = _last(text.unread, names)
    if unknown is not None and (found is None or found.file != GIVEN_FILE):
        raise ValueNotGivenError(_unknown(unknown))
    return None if found is None or found.is_false else found


def _last(settings: tuple[Setting, ...], names: tuple[str, ...]) -> Setting | None:
    matching = (each for each in reversed(settings) if each.is_of_trainer and each.flag in names)
    return next(matching, None)


def _unknown(setting: Setting) -> Fault:
    """The fault that a value is not in the launch, and how to give it."""
    word = setting.values[-1] if setting.values else setting.name
    name = word.strip("\"'").removeprefix("$").strip("{}").partition(":")[0]
    if not name.isidentifier() and not name.isdecimal():
        name = setting.name if "." in setting.name else setting.flag
    message = f"{shown(word)} is known to the host only; give it with --set {name}=VALUE"
    return Fault(file=setting.file, line=setting.line, field=setting.name, message=message)


def number_of(text: LaunchText, default: int | None, *names: str, least: int = 1) -> int | None:
    """The whole number of a flag; the default where it is missing."""
    setting = flag(text, *names)
    if setting is None:
        return default
    number = whole_number(setting.values[0]) if len(setting.values) == 1 else None
    if number is None or not least <= number <= 10**15:
        raise InputError(wrong(setting, f"a whole number from {least} on"))
    return number


def count_of(text: LaunchText, default: int, *names: str, least: int = 1) -> int:
    """The whole number of a flag that has a default."""
    number = number_of(text, default, *names, least=least)
    return default if number is None else number


def fraction_of(text: LaunchText, default: float, *names: str) -> float:
    """The number of a flag, 0 or more."""
    setting = flag(text, *names)
    if setting is None:
        return default
    try:
        number = float(setting.values[0]) if len(setting.values) == 1 else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e300:
        raise InputError(wrong(setting, "a number from 0 on"))
    return number


def word_of(text: LaunchText, default: str, *names: str) -> str:
    """The word of a flag."""
    setting = flag(text, *names)
    if setting is None:
        return default
    if len(setting.values) != 1:
        raise InputError(wrong(setting, "one word"))
    return setting.values[0]


ALGORITHM = "NCCL_ALGO"
"""The variable that holds NCCL and RCCL to an algorithm."""


def held_algorithm(text: LaunchText) -> CollectiveAlgorithm | None:
    """What the environment holds sums to; None where it leaves the library a choice."""
    setting = _algorithm(text)
    word = setting.values[0].lower() if setting is not None and setting.values else ""
    known = [each for each in CollectiveAlgorithm if word in (each.value, f"allreduce:{each}")]
    return known[0] if known else None


def algorithm_remarks(text: LaunchText) -> Iterator[str]:
    """Algorithms that no plan has."""
    setting = _algorithm(text)
    if setting is not None and held_algorithm(text) is None:
        value = shown(",".join(setting.values))
        yield f"{ALGORITHM} {value} is priced as the library's own choice"


def _algorithm(text: LaunchText) -> Setting | None:
    around = (ENVIRONMENT, "experiment.envs.")
    for each in reversed(text.settings):
        if each.name.startswith(around) and each.name.endswith(f".{ALGORITHM}"):
            return each
    return None


def is_set(text: LaunchText, *names: str) -> bool:
    """Whether a flag is there and not false."""
    return flag(text, *names) is not None


def wrong(setting: Setting, wanted: str) -> Fault:
    """The fault that a setting has the wrong form."""
    found = shown(" ".join(setting.values))
    return fault_of(setting, None, f"found {found} where {wanted} is expected")


def fault_of(setting: Setting | None, text: LaunchText | None, message: str) -> Fault:
    """A fault at a setting; at the launch's file where there is no such setting."""
    if setting is not None:
        return Fault(file=setting.file, line=setting.line, field=setting.name, message=message)
    return Fault(file="" if text is None else text.file, message=message)


def rank_count(setting: Setting) -> int:
    """The number of nodes, or of ranks of a node, that a setting gives."""
    word = setting.values[0] if setting.values else ""
    number = whole_number(word)
    if number is None or not 1 <= number <= _MAX_RANKS:
        message = f"{shown(word)}; a whole number from 1 on is expected here"
        raise fault_at(setting.file, setting.line, message, setting.name)
    return number


def world_size(text: LaunchText) -> int:
    """Ranks of the launch; an InputError that says how to give their number."""
    if text.hosts and all(host.devices is not None for host in text.hosts):
        return sum(host.devices or 0 for host in text.hosts)
    given = count_of(text, 0, "WORLD-SIZE", "world-size")
    if given:
        return given
    if text.nodes is not None and text.devices_per_node is not None:
        return text.nodes * text.devices_per_node
    unknown = [each for each in text.unread if each.name.startswith("torchrun")]
    raise ValueNotGivenError(
        Fault(
            file=unknown[0].file if unknown else text.file,
            line=unknown[0].line if unknown else 0,
            message="the launch does not say how many ranks it starts; give --set nnodes=N and "
            "--set nproc-per-node=N, or --set WORLD_SIZE=N",
        )
    )


def visible_devices(text: str) -> tuple[int, ...]:
    """Numbers of a list as in CUDA_VISIBLE_DEVICES=0,2; empty for names and anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        return ()
    numbers = tuple(map(int, parts))
    return numbers if len(set(numbers)) == len(numbers) else ()


# ---- keys of YAML and TOML


def tree_leaves(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], tuple[str, ...]]]:
    """(path, values) of every key that holds no keys; a list has one value per entry."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from tree_leaves(inner, (*path, key if isinstance(key, int) else str(key)))
    elif path:
        entries = value if isinstance(value, list) else [value]
        yield path, tuple(map(_leaf_text, entries))


def _leaf_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | dict):
        return json.dumps(value, default=str, separators=(",", ":"))
    return str(value)
