"""The command that starts a trainer: its launcher's options and the trainer's own arguments.

Launchers that are read: torchrun and `python -m torch.distributed.run` or `.launch` (options of
torch/distributed/run.py), and srun with one task per device.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, text_lines
from hetplan.trainers.launch_script import Command, Script, Word, read_script
from hetplan.trainers.launch_values import (
    GIVEN_FILE,
    Given,
    LaunchHost,
    LaunchText,
    Setting,
    rank_count,
)
from hetplan.trainers.megatron.flags import FLAGS

_RUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_TRAINER_MODULES = ("torchtitan.train", "torchtitan.trainer")
_PYTHON = re.compile(r"python[0-9.]*")
_WITHOUT_VALUE = frozenset(
    ("standalone", "no-python", "run-path", "use-env", "help", "m", "module")
)
"""Options of torch/distributed/run.py that take no value."""
_SRUN_NAMES = {"N": "nodes", "n": "ntasks", "w": "nodelist", "G": "gpus", "c": "cpus-per-task"}
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.+)$")
_NUMBER = re.compile(r"-[0-9.]")
_CHOICE = re.compile(r"(activation_checkpoint|activation-checkpoint):([a-z_-]+)")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,3}", re.ASCII)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*)|:?\?[^{}]*)?\}|(\w+))", re.ASCII)
_START = re.compile(
    r"\btorchrun\b|torch\.distributed\.(?:run|launch)|\b(?:pre)?train\w*\.py|torchtitan\.t"
)
_TITAN = re.compile(r"(?:parallelism|training|activation_checkpoint)\.")
_COUNTS = ("nnodes", "nproc-per-node")


class LaunchNotFollowedError(InputError):
    """A script that starts no trainer, or starts it in a way that is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCall:
    """A command that starts a trainer."""

    command: Command
    program: Word
    """Script or module."""
    launcher: tuple[Setting, ...]
    """Options of torchrun as `torchrun.NAME`, of srun as `srun.NAME`."""
    arguments: tuple[Word, ...]
    unread: tuple[Setting, ...]
    """Options of the launcher that only the host knows."""
    torchrun: bool


def script_launch(
    trainer: str, file: str, text: str, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """The launch in a script, or in a file that holds only arguments.

    An InputError where it starts no trainer, several different ones, or cannot be read.
    """
    text = text.replace("\r\n", "\n")
    variables = {name: value for name, value in given if _IDENTIFIER.fullmatch(name)}
    _check_given(file, text, variables)
    header = _sbatch_settings(file, text)
    if _is_plain_list(text):
        settings, unread = settings_of(file, _plain_words(file, text, variables))
        every = (*settings, *_given_settings(given))
        return _launch_text(trainer, every, hosts, None, unread)
    script = read_script(file, text, variables)
    call = _only_call(script)
    settings, unread = settings_of(file, call.arguments)
    _refuse_unknown_flags(script, unread)
    used = {name for word in call.command.words for name in word.unknown}
    program = Setting(
        name="program", values=(call.program.text,), file=file, line=call.program.line
    )
    every = (program, *header, *call.launcher, *settings, *_given_settings(given))
    return _launch_text(
        trainer,
        every,
        hosts,
        call,
        (*unread, *call.unread),
        environment=tuple(
            Setting(name=name, values=(value.text,), file=file, line=value.line)
            for name, value in call.command.exports
            if not value.unknown
        ),
        remarks=tuple(
            f"{file}:{block.first_line}: {block.kind} sets {name} and is not followed"
            for name, block in script.changed.items()
            if name in used
        ),
    )


def _launch_text(
    trainer: str,
    settings: tuple[Setting, ...],
    hosts: tuple[LaunchHost, ...],
    call: TrainerCall | None,
    unread: tuple[Setting, ...],
    environment: tuple[Setting, ...] = (),
    remarks: tuple[str, ...] = (),
) -> LaunchText:
    # torch/distributed/run.py: one node and one rank on it where nobody gives them.
    default = 1 if call is not None and call.torchrun and not call.unread else None
    nodes = _count(settings, "torchrun.nnodes", ("srun.nodes", "sbatch.nodes"), default)
    tasks: tuple[str, ...] = ()
    if call is not None and not call.torchrun:
        tasks = ("srun.ntasks-per-node", "sbatch.ntasks-per-node")
    return LaunchText(
        trainer=trainer,
        settings=settings,
        environment=environment,
        hosts=hosts,
        nodes=nodes,
        devices_per_node=_count(settings, "torchrun.nproc-per-node", tasks, default),
        unread=unread,
        remarks=remarks,
    )


def _count(
    settings: Sequence[Setting], name: str, others: tuple[str, ...], default: int | None
) -> int | None:
    """A number of nodes or ranks; None where it is missing, a range or a word as `auto`."""
    by_name = {each.name: each for each in settings if each.values}
    if name in by_name:
        # torchrun takes a range of nodes, MIN:MAX, for jobs whose size may change.
        parts = set(by_name[name].values[0].split(":"))
        return rank_count(by_name[name]) if len(parts) == 1 and _is_number(parts.pop()) else None
    for other in others:
        if other in by_name and by_name[other].values[0].isdecimal():
            return rank_count(by_name[other])
    return default


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+|.*[^a-z]+.*", text) is not None


def _check_given(file: str, text: str, variables: dict[str, str]) -> None:
    """Refuse names of `--set` that the script does not use."""
    faults = [
        Fault(
            file=GIVEN_FILE,
            field=name,
            message=f"{file} has no such variable; flags are set by their names with dashes, as in "
            "--set tensor-model-parallel-size=8",
        )
        for name in variables
        if name not in (*_COUNTS, "WORLD_SIZE")
        and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is None
    ]
    if faults:
        raise InputError(*faults)


def _given_settings(given: Given) -> Iterator[Setting]:
    for at, (name, value) in enumerate(given, start=1):
        if name in _COUNTS:
            name = f"torchrun.{name}"
        elif _IDENTIFIER.fullmatch(name) and name != "WORLD_SIZE":
            continue
        values = () if value.lower() == "true" else (value,)
        yield Setting(name=name, values=values, file=GIVEN_FILE, line=at)


# ---- a file of nothing but arguments


def _is_plain_list(text: str) -> bool:
    lines = (line.text.strip() for line in text_lines(text))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("--")


def _plain_words(file: str, text: str, variables: dict[str, str]) -> Iterator[Word]:
    """Words as a shell splits them, line by line; a variable that is not given stays unknown."""

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1) or found.group(3), found.group(2)
        return variables.get(name, f"${name}" if default is None else default)

    for line in text_lines(text):
        try:
            words = shlex.split(line.text.strip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise fault_at(file, line.number, "a quote opens here and is never closed") from error
        for word in words:
            filled = _VARIABLE.sub(value, word)
            names = tuple(found.group(3) for found in _VARIABLE.finditer(filled))
            yield Word(filled, line.number, names)


# ---- the call


def _only_call(script: Script) -> TrainerCall:
    """The one trainer that the script starts."""
    calls = [_trainer_call(script.file, command) for command in script.commands]
    different: dict[tuple[str, ...], TrainerCall] = {}
    for call in calls:
        if call is not None:
            different.setdefault(tuple(word.text for word in call.arguments), call)
    if not different:
        raise _no_trainer(script)
    if len(different) > 1:
        lines = ", ".join(str(call.program.line) for call in different.values())
        message = (
            f"starts several trainers with different arguments, on lines {lines[:80]}; keep one in "
            "a copy of the file"
        )
        raise fault_at(script.file, [*different.values()][1].program.line, message)
    return next(iter(different.values()))


_INSTEAD = (
    "give a script that holds only assignments and the trainer's command, a file of its arguments, "
    "or a log with the argument list that Megatron-LM prints"
)


def _no_trainer(script: Script) -> LaunchNotFollowedError:
    lines = script.source.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if _START.search(line.partition("#")[0]) is None:
            continue
        inside = [
            each.kind for each in script.blocks if each.first_line <= number <= each.last_line
        ]
        where = inside[0] if inside else "a command that is not followed"
        message = f"the trainer is started inside {where}; {_INSTEAD}"
        return LaunchNotFollowedError(Fault(file=script.file, line=number, message=message))
    message = (
        "starts no trainer that is known here: torchrun, python -m torch.distributed.run, or "
        "python with a script named ...train...py; a file of nothing but arguments is read too"
    )
    return LaunchNotFollowedError(Fault(file=script.file, message=message))


def _refuse_unknown_flags(script: Script, unread: tuple[Setting, ...]) -> None:
    """Refuse a list of flags that a block changes, where it names flags that hetplan reads."""
    words = " ".join(value for each in unread if not each.name for value in each.values)
    for name, block in script.changed.items():
        read = [flag for flag in block.flags if flag in FLAGS or _TITAN.match(flag)]
        if read and re.search(rf"\${re.escape(name)}\b", words):
            message = f"{block.kind} puts --{read[0]} into {name}, and is not followed; {_INSTEAD}"
            fault = Fault(file=script.file, line=block.first_line, message=message)
            raise LaunchNotFollowedError(fault)


def _trainer_call(file: str, command: Command) -> TrainerCall | None:
    """The trainer that a command starts; None where it starts none."""
    words = command.words
    texts = [word.text for word in words]
    before = tuple(_srun_settings(file, words))
    run = _torchrun_at(texts)
    at = _program_at(texts)
    options: tuple[Setting, ...] = ()
    unread: tuple[Setting, ...] = ()
    if run is not None:
        options, unread, at = _torchrun_options(file, words, run + 1)
    if at is None or at >= len(words):
        return None
    return TrainerCall(
        command=command,
        program=words[at],
        launcher=(*before, *options),
        arguments=words[at + 1 :],
        unread=unread,
        torchrun=run is not None,
    )


def _torchrun_at(texts: list[str]) -> int | None:
    """Index of the last word before torchrun's options."""
    for at, text in enumerate(texts):
        if text.rpartition("/")[2] == "torchrun":
            return at
        if text == "-m" and at + 1 < len(texts) and texts[at + 1] in _RUN_MODULES:
            return at + 1
        if text.endswith(("torch/distributed/run.py", "torch/distributed/launch.py")):
            return at
    return None


def _program_at(texts: list[str]) -> int | None:
    """Index of a trainer's script or module that python starts."""
    for at, text in enumerate(texts):
        if _PYTHON.fullmatch(text.rpartition("/")[2]) is None:
            continue
        for after in range(at + 1, len(texts)):
            if texts[after - 1] == "-m":
                return after if texts[after] in _TRAINER_MODULES else None
            if not texts[after].startswith("-"):
                name = texts[after].rpartition("/")[2]
                return after if "train" in name and name.endswith(".py") else None
    return None


def _torchrun_options(
    file: str, words: tuple[Word, ...], at: int
) -> tuple[tuple[Setting, ...], tuple[Setting, ...], int]:
    """Known and unknown options of torchrun, and the index of the program."""
    known: list[Setting] = []
    unread: list[Setting] = []
    while at < len(words):
        word = words[at]
        if not word.text.startswith("-"):
            if word.unknown and any(_is_program(each.text) for each in words[at + 1 :]):
                # A list of options that only the host knows.
                unread.append(
                    Setting(name="torchrun", values=(word.text,), file=file, line=word.line)
                )
                at += 1
                continue
            break
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        values: tuple[str, ...] = (value,) if equals else ()
        at += 1
        doubtful = bool(word.unknown)
        if not equals and name not in _WITHOUT_VALUE and at < len(words):
            values, doubtful = (words[at].text,), bool(words[at].unknown)
            at += 1
        setting = Setting(name=f"torchrun.{name}", values=values, file=file, line=word.line)
        (unread if doubtful else known).append(setting)
    return tuple(known), tuple(unread), at


def _is_program(text: str) -> bool:
    return text.endswith(".py") or text in _TRAINER_MODULES


def _srun_settings(file: str, words: tuple[Word, ...]) -> Iterator[Setting]:
    """The options of srun that stand before its command."""
    if not words or words[0].text.rpartition("/")[2] != "srun":
        return
    at = 1
    while at < len(words) and words[at].text.startswith("-"):
        word = words[at]
        at += 1
        name, equals, value = word.text.lstrip("-").partition("=")
        if not word.text.startswith("--"):
            if len(name) > 1 and name[0] in _SRUN_NAMES:
                name, equals, value = name[0], "=", name[1:]
            name = _SRUN_NAMES.get(name, name)
        if not equals and at < len(words) and name in ("nodes", "ntasks", "ntasks-per-node"):
            word, value, equals = words[at], words[at].text, "="
            at += 1
        if not word.unknown:
            values = (value,) if equals else ()
            yield Setting(name=f"srun.{name}", values=values, file=file, line=word.line)


def _sbatch_settings(file: str, text: str) -> tuple[Setting, ...]:
    """`#SBATCH` lines as settings `sbatch.NAME`."""
    found: list[Setting] = []
    for number, line in enumerate(text.split("\n"), start=1):
        header = _SBATCH.match(line.strip())
        words = [] if header is None else header.group(1).partition(" #")[0].split()
        for at, word in enumerate(words):
            if not word.startswith("-"):
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
                value, equals = words[at + 1], "="
            if not word.startswith("--"):
                name = _SRUN_NAMES.get(name, name)
            values = (value,) if equals else ()
            found.append(Setting(name=f"sbatch.{name}", values=values, file=file, line=number))
    return tuple(found)


def settings_of(
    file: str, arguments: Iterator[Word] | tuple[Word, ...]
) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """A program's arguments as settings: the known ones, and those that only the host knows.

    The values of a flag are the words up to the next flag. A word `NAME:CHOICE` is a setting of its
    own, as torchtitan's `activation_checkpoint:full`.
    """
    words = tuple(arguments)
    known: list[Setting] = []
    unread: list[Setting] = []
    at = 0
    while at < len(words):
        word = words[at]
        doubtful = bool(word.unknown)
        name, values = "", [word.text]
        at += 1
        choice = _CHOICE.fullmatch(word.text)
        if choice is not None:
            name, values = choice.group(1), [choice.group(2)]
        elif word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            values = [value] if equals else []
            while at < len(words) and not equals and _is_value(words[at].text):
                if words[at].unknown and (values or not _is_single(words[at])):
                    break  # it may hold further flags
                doubtful = doubtful or bool(words[at].unknown)
                values.append(words[at].text)
                at += 1
        setting = Setting(name=name, values=tuple(values), file=file, line=word.line)
        (unread if doubtful else known).append(setting)
    return tuple(known), tuple(unread)


def _is_value(text: str) -> bool:
    is_flag = text.startswith("-") and _NUMBER.match(text) is None and text != "-"
    return not is_flag and _CHOICE.fullmatch(text) is None


def _is_single(word: Word) -> bool:
    """Whether the word is one value: not `$@`, `$ARGS[@]` or a variable named for arguments."""
    return not re.search(r"@|\*|ARG|OPT|EXTRA|FLAG", word.text)
