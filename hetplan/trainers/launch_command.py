"""The command that starts a trainer: its launcher's options and the trainer's own arguments.

Read are torchrun, `python -m torch.distributed.run` (or `.launch`) with their options
(torch/distributed/run.py), and a python that runs the trainer's script or module. Of any other
launcher (srun, mpirun, pdsh) the options are passed over: --set gives the number of ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, text_lines
from hetplan.trainers.launch_script import Script, Word
from hetplan.trainers.launch_values import (
    ALGORITHM,
    ENVIRONMENT,
    GIVEN_FILE,
    Given,
    LaunchHost,
    LaunchText,
    Setting,
    rank_count,
)
from hetplan.trainers.megatron.flags import FLAGS

_RUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_RUN_PROGRAMS = ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py")
_TRAINER_MODULES = ("torchtitan.train", "torchtitan.trainer")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_WITHOUT_VALUE = ("standalone", "no-python", "run-path", "use-env", "help", "m", "module")
"""Options of torch/distributed/run.py that take no value."""
_NUMBER = re.compile(r"-[0-9.]")
_CHOICE = re.compile(r"(activation_checkpoint|activation-checkpoint):([a-z_-]+)")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,3}", re.ASCII)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*)|:?\?[^{}]*)?\}|(\w+))", re.ASCII)
_START = re.compile(
    r"\btorchrun\b|torch\.distributed\.(?:run|launch)|\b(?:pre)?train\w*\.py|torchtitan\.t"
)
_TITAN = re.compile(r"(?:parallelism|training|activation_checkpoint)\.")
_COUNTS = ("nnodes", "nproc-per-node")
_ALGORITHM_GIVEN = re.compile(rf"(?:--export=(?:.*,)?)?{ALGORITHM}=([^,]*)")
_INSTEAD = (
    "give a script that holds only assignments and the trainer's command, a file of its arguments, "
    "or a log with the argument list that Megatron-LM prints"
)


class LaunchNotFollowedError(InputError):
    """A script that starts no trainer, or starts it in a way that is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCall:
    """A command that starts a trainer."""

    words: tuple[Word, ...]
    """The whole command."""
    program: Word
    """Script or module."""
    launcher: tuple[Setting, ...]
    """Options of torchrun as `torchrun.NAME`."""
    unread: tuple[Setting, ...]
    """Options of torchrun that only the host knows."""
    arguments: tuple[Word, ...]
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
    remarks: tuple[str, ...] = ()
    if _is_argument_list(text):
        known, unread = settings_of(file, tuple(_listed_words(file, text, variables)))
        default = None
    else:
        script = Script(file, text, variables)
        call = _only_call(script)
        known, unread = settings_of(file, call.arguments)
        _refuse_unknown_flags(script, unread)
        known, unread = (*call.launcher, *known), (*unread, *call.unread)
        held = _before_program(call) or script.variable(ALGORITHM, call.words)
        if held is not None:
            name = f"{ENVIRONMENT}{ALGORITHM}"
            setting = Setting(name=name, values=(held.text,), file=file, line=held.line)
            known = (*known, setting)
        remarks = tuple(_remarks(script, call))
        # torch/distributed/run.py: one node and one rank on it where nobody gives them.
        default = 1 if call.torchrun and not call.unread else None
    settings = (*known, *_given_settings(given))
    return LaunchText(
        trainer=trainer,
        settings=settings,
        hosts=hosts,
        nodes=_count(settings, "torchrun.nnodes", default),
        devices_per_node=_count(settings, "torchrun.nproc-per-node", default),
        unread=unread,
        remarks=remarks,
    )


def _count(settings: Sequence[Setting], name: str, default: int | None) -> int | None:
    """A number of nodes or ranks; None for a range MIN:MAX of nodes or a word such as `auto`."""
    setting = next((each for each in reversed(settings) if each.name == name), None)
    if setting is None or not setting.values:
        return default
    bounds = set(setting.values[0].split(":"))
    return None if len(bounds) > 1 or bounds.pop().isalpha() else rank_count(setting)


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


_SWITCHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("true", "yes", "on"), ()),
    **dict.fromkeys(("false", "no", "off"), ("false",)),
}
"""How a given value switches a flag on or off."""


def _given_settings(given: Given) -> Iterator[Setting]:
    for at, (name, value) in enumerate(given, start=1):
        if name in _COUNTS:
            name = f"torchrun.{name}"
        elif _IDENTIFIER.fullmatch(name) and name != "WORLD_SIZE":
            continue
        switch = _SWITCHES.get(value.lower())
        values = (value,) if switch is None else switch
        yield Setting(name=name, values=values, file=GIVEN_FILE, line=at)


def _remarks(script: Script, call: TrainerCall) -> Iterator[str]:
    texts = " ".join(word.text for word in call.words if not word.known)
    for name, block in script.changed.items():
        if re.search(rf"\${re.escape(name)}\b", texts):
            yield f"{script.file}:{block.first_line}: {block.kind} sets {name} and is not followed"


# ---- a file of nothing but arguments


def _is_argument_list(text: str) -> bool:
    lines = (line.text.strip() for line in text_lines(text))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("--")


def _listed_words(file: str, text: str, variables: dict[str, str]) -> Iterator[Word]:
    """Words as a shell splits them, line by line; layouts need no quotes here."""

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
            yield Word(filled, line.number, _VARIABLE.search(filled) is None)


# ---- the call


def _before_program(call: TrainerCall) -> Word | None:
    """The algorithm that `env NAME=VALUE` or srun's `--export` gives the trainer."""
    for word in reversed(call.words[: len(call.words) - len(call.arguments)]):
        found = _ALGORITHM_GIVEN.match(word.text)
        if found is not None:
            return replace(word, text=found[1])
    return None


def _only_call(script: Script) -> TrainerCall:
    """The one trainer that the script starts."""
    different: dict[tuple[str, ...], TrainerCall] = {}
    for words in script.commands:
        call = _trainer_call(script.file, words)
        if call is not None:
            different.setdefault(tuple(word.text for word in call.arguments), call)
    calls = [*different.values()]
    if not calls:
        raise LaunchNotFollowedError(_no_trainer(script))
    if len(calls) > 1:
        lines = ", ".join(str(call.program.line) for call in calls)
        message = (
            f"starts several trainers with different arguments, on lines {lines[:80]}; keep one in "
            "a copy of the file"
        )
        raise fault_at(script.file, calls[1].program.line, message)
    return calls[0]


def _no_trainer(script: Script) -> Fault:
    for number, line in enumerate(script.text.split("\n"), start=1):
        if _START.search(line.partition("#")[0]) is None:
            continue
        kinds = [
            block.kind for block in script.blocks if block.first_line <= number <= block.last_line
        ]
        where = kinds[0] if kinds else "a command that is not followed"
        message = f"the trainer is started inside {where}; {_INSTEAD}"
        return Fault(file=script.file, line=number, message=message)
    message = (
        "starts no trainer that is known here: torchrun, python -m torch.distributed.run, or "
        "python with a script named ...train...py; a file of nothing but arguments is read too"
    )
    return Fault(file=script.file, message=message)


def _refuse_unknown_flags(script: Script, unread: tuple[Setting, ...]) -> None:
    """Refuse a list of flags that a block changes, where it names flags that hetplan reads."""
    words = " ".join(value for setting in unread if not setting.name for value in setting.values)
    for name, block in script.changed.items():
        read = [flag for flag in block.flags if flag in FLAGS or _TITAN.match(flag)]
        if read and re.search(rf"\${re.escape(name)}\b", words):
            message = f"{block.kind} puts --{read[0]} into {name}, and is not followed; {_INSTEAD}"
            fault = Fault(file=script.file, line=block.first_line, message=message)
            raise LaunchNotFollowedError(fault)


def _trainer_call(file: str, words: tuple[Word, ...]) -> TrainerCall | None:
    """The trainer that a command starts; None where it starts none."""
    texts = [word.text for word in words]
    options_at = _torchrun_options_at(texts)
    launcher: tuple[Setting, ...] = ()
    unread: tuple[Setting, ...] = ()
    if options_at is not None:
        launcher, unread, at = _torchrun_options(file, words, options_at)
    else:
        at = _program_at(texts)
    if at >= len(words):
        return None
    return TrainerCall(
        words=words,
        program=words[at],
        launcher=launcher,
        unread=unread,
        arguments=words[at + 1 :],
        torchrun=options_at is not None,
    )


def _torchrun_options_at(texts: list[str]) -> int | None:
    """Index of the word after torchrun; None where the command does not start it."""
    for at, text in enumerate(texts):
        if text == "torchrun" or text.endswith(tuple(f"/{name}" for name in _RUN_PROGRAMS)):
            return at + 1
        if text == "-m" and texts[at + 1 : at + 2] in ([name] for name in _RUN_MODULES):
            return at + 2
    return None


def _program_at(texts: list[str]) -> int:
    """Index of a trainer's script or module that python starts; behind the end: there is none."""
    python = next((at for at, text in enumerate(texts) if _PYTHON.fullmatch(text)), len(texts))
    for at in range(python + 1, len(texts)):
        if texts[at - 1] == "-m":
            return at if texts[at] in _TRAINER_MODULES else len(texts)
        if not texts[at].startswith("-"):
            name = texts[at].rpartition("/")[2]
            return at if "train" in name and name.endswith(".py") else len(texts)
    return len(texts)


def _torchrun_options(
    file: str, words: tuple[Word, ...], at: int
) -> tuple[tuple[Setting, ...], tuple[Setting, ...], int]:
    """Known and unknown options of torchrun, and the index of the program."""
    known: list[Setting] = []
    unread: list[Setting] = []
    while at < len(words):
        word = words[at]
        is_option = word.text.startswith("-")
        if not is_option and (word.known or not any(map(_is_program, words[at + 1 :]))):
            break
        at += 1
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        is_known = word.known
        values = (value,) if equals else ()
        if not is_option:
            # A list of options that only the host knows.
            name, values = "", (word.text,)
        elif not equals and name not in _WITHOUT_VALUE and at < len(words):
            values, is_known = (words[at].text,), words[at].known
            at += 1
        name = f"torchrun.{name}" if name else "torchrun"
        setting = Setting(name=name, values=values, file=file, line=word.line)
        (known if is_known else unread).append(setting)
    return tuple(known), tuple(unread), at


def _is_program(word: Word) -> bool:
    return word.text.endswith(".py") or word.text in _TRAINER_MODULES


def settings_of(
    file: str, words: tuple[Word, ...]
) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """A program's arguments as settings: the known ones, and those that only the host knows.

    The values of a flag are the words up to the next flag. A word `NAME:CHOICE` is a setting of its
    own, as torchtitan's `activation_checkpoint:full`.
    """
    known: list[Setting] = []
    unread: list[Setting] = []
    at = 0
    while at < len(words):
        word = words[at]
        is_known = word.known
        name, values = "", [word.text]
        at += 1
        choice = _CHOICE.fullmatch(word.text)
        if choice is not None:
            name, values = choice.group(1), [choice.group(2)]
        elif word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            values = [value] if equals else []
            while at < len(words) and not equals and _is_value(words[at].text):
                if not words[at].known and (values or not _is_single(words[at])):
                    break  # it may hold further flags
                is_known = is_known and words[at].known
                values.append(words[at].text)
                at += 1
        setting = Setting(name=name, values=tuple(values), file=file, line=word.line)
        (known if is_known else unread).append(setting)
    return tuple(known), tuple(unread)


def _is_value(text: str) -> bool:
    is_flag = text.startswith("-") and _NUMBER.match(text) is None and text != "-"
    return not is_flag and _CHOICE.fullmatch(text) is None


def _is_single(word: Word) -> bool:
    """Whether the word is one value: not `$@`, `$ARGS[@]` or a variable named for arguments."""
    return not re.search(r"@|\*|ARG|OPT|EXTRA|FLAG", word.text)
