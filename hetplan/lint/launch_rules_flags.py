"""Do the flags of a launch of Megatron-LM fit each other, and does each do what it says?

Read in Megatron-LM's megatron/training/arguments.py (validate_args) and
core/transformer/transformer_config.py (recomputation), not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib.resources import files

from hetplan.cluster.spec import Island
from hetplan.importers.launches.values import Setting
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, is_of_trainer, launch_rule, leaf, seen

_GRANULARITY = "recompute-granularity"
_METHOD = "recompute-method"
_COUNT = "recompute-num-layers"
_FSDP = ("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALIKE = 0.85
"""Of difflib's ratio: one wrong letter in seven, or two letters in the wrong order."""
_MAX_COMPARED = 100
"""Flags that Megatron-LM does not have; a launch with more is a trainer of its own."""
_MIN_LENGTH = 8
"""Letters of a flag that is compared with others: shorter ones resemble each other by chance."""


def _recompute(launch: Launch) -> Iterator[Seen]:
    if not launch.is_megatron_like:
        return
    granularity = launch.word(_GRANULARITY)
    method, count = launch.has(_METHOD), launch.has(_COUNT)
    shows = tuple(launch.get(name) for name in (_GRANULARITY, _METHOD, _COUNT))
    if granularity is None and not launch.may_have(_GRANULARITY):
        if launch.has("recompute-activations"):
            granularity = "selective"
        elif method or count:
            flag = _METHOD if method else _COUNT
            yield seen(
                f"--{flag} without --{_GRANULARITY}: nothing is recomputed; write "
                f"--{_GRANULARITY} full, or leave it out",
                *shows,
            )
            return
    if granularity == "selective" and (method or count):
        flags = " and ".join(f"--{name}" for name in (_METHOD, _COUNT) if launch.has(name))
        yield seen(
            f"selective recomputation with {flags}, which belong to full: the trainer stops; write "
            f"--{_GRANULARITY} full, or name parts of a layer with --recompute-modules",
            launch.get("recompute-activations"),
            *shows,
        )
    elif granularity == "full":
        yield from _full(launch)
    elif granularity not in (None, "selective"):
        yield seen(f"--{_GRANULARITY} {granularity}: it is full or selective", *shows)


def _full(launch: Launch) -> Iterator[Seen]:
    shows = tuple(launch.get(name) for name in (_GRANULARITY, _METHOD, _COUNT))
    per_stage = launch.may_have("recompute-method-per-stage-micro-batch")
    lacks = [name for name in (_METHOD, _COUNT) if not launch.may_have(name) and not per_stage]
    if lacks:
        written = " ".join(
            {_METHOD: f"--{_METHOD} uniform", _COUNT: f"--{_COUNT} 1"}[n] for n in lacks
        )
        yield seen(
            f"full recomputation without {' and '.join('--' + name for name in lacks)}: the "
            f"trainer stops; write {written}",
            *shows,
        )
    method = launch.word(_METHOD)
    if method not in (None, "uniform", "block"):
        yield seen(f"--{_METHOD} {method}: it is uniform or block", *shows)
    both = ("distribute-saved-activations", "sequence-parallel")
    if all(map(launch.has, both)) and launch.tp and launch.tp > 1:
        yield seen(
            f"--{both[0]} with --{both[1]}: the trainer stops, sequence parallelism has them split "
            "already; leave the first out",
            *map(launch.get, both),
        )


def _connections(launch: Launch) -> Iterator[Seen]:
    """The variable that pre-Blackwell devices need with tp or cp."""
    if not launch.is_megatron_like or not _starts(launch):
        return
    found = _variable(launch, _CONNECTIONS)
    value = found.values[0] if found is not None and found.values else None
    fsdp = next((name for name in _FSDP if launch.has(name)), None)
    if fsdp is not None:
        if value == "1":
            yield seen(
                f"{_CONNECTIONS}=1 with --{fsdp}: the trainer stops, its collectives run beside "
                "compute on queues of their own; unset it",
                found,
                launch.get(fsdp),
            )
        return
    cut = [
        (name, degree)
        for name, degree in (("tp", _most_tp(launch)), ("cp", launch.cp))
        if degree is not None and degree > 1
    ]
    if not cut or launch.may_have("overlap-moe-expert-parallel-comm") or launch.is_open:
        return
    if launch.cluster is not None and all(map(_is_blackwell, launch.cluster.islands)):
        return
    if found is None or value not in (None, "1"):
        asked = " and ".join(f"{name} {degree}" for name, degree in cut)
        what = f"is {value}" if found is not None else "is not set here"
        yield seen(
            f"{asked}, and {_CONNECTIONS} {what}: unless all devices are Blackwell or the hosts "
            f"set it, the trainer stops; write export {_CONNECTIONS}=1",
            found,
        )


def _variable(launch: Launch, name: str) -> Setting | None:
    """The variable as all hosts have it, or some: FlagScale's file, an emitted folder's table."""
    text = launch.text
    every = [each for each in text.environment if each.name == name]
    everywhere = (*text.environment, *text.settings)
    of_some = [each for each in everywhere if each.name.endswith(f".{name}")]
    return next(reversed((*of_some, *every)), None)


def _is_blackwell(island: Island) -> bool:
    """Whether the devices are NVIDIA's of that generation or later: the first with 4-bit floats."""
    return island.device.vendor == "nvidia" and "float4" in island.device.dtypes


def _starts(launch: Launch) -> bool:
    """Whether the environment would stand here: not in FlagScale's file of arguments alone."""
    settings = launch.text.settings
    return launch.text.trainer != "flagscale" or any(
        each.name.startswith("experiment.") for each in settings
    )


def _most_tp(launch: Launch) -> int | None:
    if not launch.is_hetero:
        return launch.tp
    meshes = launch.numbers("hetero-process-meshes")
    return max(meshes[0::5], default=None) if meshes else None


_NEEDS = (
    ("overlap-param-gather", ("use-distributed-optimizer", "use-megatron-fsdp")),
    ("overlap-param-gather", ("overlap-grad-reduce",)),
    ("tp-comm-overlap", ("sequence-parallel",)),
    ("overlap-param-gather-with-optimizer-step", ("use-distributed-optimizer",)),
    ("overlap-param-gather-with-optimizer-step", ("overlap-param-gather",)),
    ("fp8-param-gather", ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp")),
    ("optimizer-cpu-offload", ("use-precision-aware-optimizer",)),
)
"""A flag, and those of which it needs one (validate_args)."""


def _needs(launch: Launch) -> Iterator[Seen]:
    if not launch.is_megatron_like:
        return
    for flag, others in _NEEDS:
        if not launch.has(flag) or any(launch.may_have(other) for other in others):
            continue
        if launch.word("optimizer") in ("dist_muon",) and flag == "overlap-param-gather":
            continue
        wanted = " or ".join(f"--{other}" for other in others)
        yield seen(f"--{flag} without {wanted}: the trainer stops; write it", launch.get(flag))
    shards = "use-distributed-optimizer"
    optimizer = launch.word("optimizer")
    if launch.has(shards) and optimizer == "sgd":
        yield seen(
            f"--{shards} with --optimizer sgd: the trainer stops, only Adam's state is sharded; "
            f"leave --{shards} out",
            launch.get(shards),
            launch.get("optimizer"),
        )


def _idle(launch: Launch) -> Iterator[Seen]:
    """Flags without effect."""
    if not launch.is_megatron_like:
        return
    if launch.has("sequence-parallel") and launch.tp == 1 and not launch.is_hetero:
        yield seen(
            "--sequence-parallel with tp 1: it is switched off; leave it out",
            launch.get("sequence-parallel"),
        )
    if (
        launch.has("num-query-groups")
        and not launch.may_have("group-query-attention")
        and launch.number("num-query-groups") != launch.number("num-attention-heads")
        and not launch.may_have("multi-latent-attention")
    ):
        yield seen(
            f"--num-query-groups {launch.word('num-query-groups')} without "
            "--group-query-attention: every head gets keys and values of its own, a larger model; "
            "write --group-query-attention",
            launch.get("num-query-groups"),
        )


def _twice(launch: Launch) -> Iterator[Seen]:
    """Flags that are given again with another value."""
    if launch.text.trainer == "flagscale":
        return  # leaves of YAML: one name in two mappings is one flag given twice only by chance
    for name, settings in launch.by_name.items():
        last = settings[-1]
        others = [each for each in settings[:-1] if each.values != last.values]
        if name and others and len({each.name for each in settings}) == 1:
            values = ", ".join(" ".join(each.values) for each in (*others, last))
            yield seen(
                f"--{last.name} is given as {values:.200}; the last one counts",
                *others,
                last,
            )


@cache
def known_flags() -> frozenset[str]:
    """Every flag of Megatron-LM, and more: see the file's first lines."""
    text = files("hetplan.lint").joinpath("launch_flags_megatron.txt").read_text("utf-8")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def _unknown(launch: Launch) -> Iterator[Seen]:
    """Flags that Megatron-LM does not have, close to one that it has."""
    if launch.text.trainer != "megatron":
        return
    known = known_flags()
    compared: set[str] = set()
    for each in launch.text.settings:
        name = leaf(each.name)
        if not is_of_trainer(each) or name in known or len(name) < _MIN_LENGTH:
            continue
        compared.add(name)
        if len(compared) > _MAX_COMPARED:
            return
        near = get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if near and not _is_other_word(name, near[0]):
            yield seen(
                f"--{each.name} is no flag of Megatron-LM, which stops at unknown ones; did you "
                f"mean --{near[0]}?",
                each,
            )


def _is_other_word(name: str, near: str) -> bool:
    """Whether the names differ in a number or a whole word, as flags of one family do."""
    parts, others = name.split("-"), near.split("-")
    if len(parts) != len(others):
        return sorted("".join(parts)) != sorted("".join(others))
    unlike = [pair for pair in zip(parts, others, strict=True) if pair[0] != pair[1]]
    return any(SequenceMatcher(None, *pair).ratio() < 0.6 for pair in unlike)


RULES = (
    launch_rule(
        id="launch-recompute-flags",
        severity=Severity.ERROR,
        title="flags of recomputation that contradict each other",
        explanation="Full recomputation needs a method and a number of layers; selective takes "
        "neither, only parts of a layer. Megatron-LM stops where they are mixed, and recomputes "
        "nothing where no granularity is named.",
        advice="Write --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1, or --recompute-granularity selective --recompute-modules.",
        look=_recompute,
    ),
    launch_rule(
        id="launch-device-connections",
        severity=Severity.WARNING,
        title="CUDA_DEVICE_MAX_CONNECTIONS that tensor or context parallelism need at 1",
        explanation="Before Blackwell, Megatron-LM counts on kernels starting in the order in "
        "which they were launched, which one hardware queue gives. It stops without the variable; "
        "FSDP stops with it.",
        advice="Write export CUDA_DEVICE_MAX_CONNECTIONS=1 before torchrun, on every host.",
        look=_connections,
    ),
    launch_rule(
        id="launch-flag-needs-another",
        severity=Severity.ERROR,
        title="flags without those that they need",
        explanation="Megatron-LM overlaps the gathering of parameters only with the distributed "
        "optimizer and overlapped reduction, tensor parallelism only with sequence parallelism. It "
        "stops otherwise.",
        advice="Write the flag that is missing, or leave this one out.",
        look=_needs,
    ),
    launch_rule(
        id="launch-flag-without-effect",
        severity=Severity.WARNING,
        title="flags that do nothing as they are written",
        explanation="Megatron-LM switches some flags off and goes on, with a line in the log at "
        "most: the run is not the one that the script names.",
        advice="Leave the flag out, or write what makes it count.",
        look=_idle,
    ),
    launch_rule(
        id="launch-flag-twice",
        severity=Severity.WARNING,
        title="a flag given twice with different values",
        explanation="The last value counts, and nothing is said of the first, which is the one "
        "that a reader sees.",
        advice="Keep one.",
        look=_twice,
    ),
    launch_rule(
        id="launch-unknown-flag",
        severity=Severity.WARNING,
        title="a flag that resembles one of Megatron-LM",
        explanation="Megatron-LM neither knows abbreviations nor passes over flags that it does "
        "not know. One that is almost a known one is a slip, unless the script's own program adds "
        "it.",
        advice="Write the flag as the trainer has it.",
        look=_unknown,
    ),
)
