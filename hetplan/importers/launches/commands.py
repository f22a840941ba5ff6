"""Where in a script is the trainer started, by what, and with which arguments?

Launchers that are read: torchrun and `python -m torch.distributed.run` or `.launch` (options of
torch/distributed/run.py), and srun with one task per device, behind whatever stands before them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetplan.importers.launches.shell import Command
from hetplan.importers.launches.shell_values import (
    Field,
    known_text,
    line_of_field,
    text_of_field,
    unknown_of,
)
from hetplan.importers.launches.values import Setting

_RUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_TRAINER_MODULES = ("torchtitan.train", "torchtitan.trainer")
_PYTHON = re.compile(r"python[0-9.]*")
# Options of torch/distributed/run.py that take no value.
_WITHOUT_VALUE = frozenset(
    (
        "standalone",
        "no-python",
        "run-path",
        "use-env",
        "signals-to-handle-off",
        "help",
        "m",
        "module",
    )
)
_SRUN_NAMES = {
    "N": "nodes",
    "n": "ntasks",
    "w": "nodelist",
    "G": "gpus",
    "c": "cpus-per-task",
}
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.+)$")
_FLAG = re.compile(r"--[A-Za-z]")
_NUMBER = re.compile(r"-[0-9.]")
_CHOICE = re.compile(r"(activation_checkpoint|activation-checkpoint):([a-z_-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCall:
    """A command that starts a trainer."""

    command: Command
    program: str
    """Script or module."""
    launcher: tuple[Setting, ...]
    """Options of torchrun as `torchrun.NAME`, of srun as `srun.NAME`."""
    arguments: tuple[Field, ...]
    unread: tuple[Setting, ...]
    """Words among the launcher's options that only the host knows."""
    torchrun: bool


def trainer_call(file: str, command: Command) -> TrainerCall | None:
    """The trainer that a command starts; None where it starts none."""
    texts = [text_of_field(word) for word in command.words]
    before = srun_settings(file, command.words)
    run = _torchrun_at(texts)
    if run is None:
        at = _program_at(texts)
        if at is None:
            return None
        return TrainerCall(
            command=command,
            program=texts[at],
            launcher=before,
            arguments=command.words[at + 1 :],
            unread=(),
            torchrun=False,
        )
    options, unread, at = _options(file, command.words, run + 1)
    if at >= len(texts):
        return None
    return TrainerCall(
        command=command,
        program=texts[at],
        launcher=(*before, *options),
        arguments=command.words[at + 1 :],
        unread=unread,
        torchrun=True,
    )


def stray_flag(file: str, command: Command) -> Setting | None:
    """The flag that a command begins with; None for any other command.

    What stands before it has ended early: at a backslash with a blank after it, or at a line break
    in a text that a shell gets as its script.
    """
    text = text_of_field(command.words[0]) if command.words else ""
    if not _FLAG.match(text) or unknown_of(command.words[0]):
        return None
    name, equals, value = text[2:].partition("=")
    values = (value,) if equals else tuple(map(text_of_field, command.words[1:]))
    return Setting(name=name, values=values, file=file, line=line_of_field(command.words[0]))


def blank_end(file: str, command: Command) -> Setting | None:
    """The blank that is the last word of a command, as after a backslash; None where there is none.

    Its name is empty.
    """
    last = command.words[-1]
    text = text_of_field(last)
    if not text or text.strip() or unknown_of(last):
        return None
    return Setting(name="", values=(text,), file=file, line=line_of_field(last))


def _torchrun_at(texts: list[str]) -> int | None:
    """Place of the word after which torchrun's options begin."""
    for at, text in enumerate(texts):
        if text.rpartition("/")[2] == "torchrun":
            return at
        if text == "-m" and at + 1 < len(texts) and texts[at + 1] in _RUN_MODULES:
            return at + 1
        if text.endswith(("torch/distributed/run.py", "torch/distributed/launch.py")):
            return at
    return None


def _program_at(texts: list[str]) -> int | None:
    """Place of a trainer's script that python starts, or of its module."""
    for at, text in enumerate(texts):
        if _PYTHON.fullmatch(text.rpartition("/")[2]) is None:
            continue
        for after in range(at + 1, len(texts)):
            if texts[after - 1] == "-m":
                return after if texts[after] in _TRAINER_MODULES else None
            if not texts[after].startswith("-"):
                name = texts[after].rpartition("/")[2]
                found = re.search(r"pretrain|train", name) and name.endswith(".py")
                return after if found else None
    return None


def _options(
    file: str, words: tuple[Field, ...], at: int
) -> tuple[tuple[Setting, ...], tuple[Setting, ...], int]:
    """Options of torchrun, what of them is unknown, and the place of the program."""
    found: list[Setting] = []
    unread: list[Setting] = []
    module = False
    while at < len(words):
        text, line = text_of_field(words[at]), line_of_field(words[at])
        if not text.startswith("-"):
            if unknown_of(words[at]) and known_text(words[at]) is None and not module:
                # A list of options, or the program: it is the program where no other follows.
                if not any(_is_program(text_of_field(word)) for word in words[at + 1 :]):
                    return tuple(found), tuple(unread), at
                if not _is_program(text):
                    unread.append(Setting(name="torchrun", values=(text,), file=file, line=line))
                    at += 1
                    continue
            return tuple(found), tuple(unread), at
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        at += 1
        values: tuple[str, ...] = (value,) if equals else ()
        field = words[at - 1]
        if name in ("m", "module"):
            module = True
        if not equals and name not in _WITHOUT_VALUE and at < len(words):
            field = words[at]
            values = (text_of_field(field),)
            at += 1
        setting = Setting(name=f"torchrun.{name}", values=values, file=file, line=line)
        (unread if unknown_of(field) else found).append(setting)
    return tuple(found), tuple(unread), at


def _is_program(text: str) -> bool:
    return text.endswith(".py") or text in _TRAINER_MODULES


def srun_settings(file: str, words: tuple[Field, ...]) -> tuple[Setting, ...]:
    """The options of srun that stand before its command."""
    if not words or text_of_field(words[0]).rpartition("/")[2] != "srun":
        return ()
    found: list[Setting] = []
    at = 1
    while at < len(words) and text_of_field(words[at]).startswith("-"):
        text, line = text_of_field(words[at]), line_of_field(words[at])
        at += 1
        name, equals, value = text.lstrip("-").partition("=")
        if not text.startswith("--") and len(name) > 1 and name[0] in _SRUN_NAMES:
            name, equals, value = name[0], "=", name[1:]
        name = _SRUN_NAMES.get(name, name) if not text.startswith("--") else name
        if not equals and at < len(words) and name in ("nodes", "ntasks", "ntasks-per-node"):
            value, equals = text_of_field(words[at]), "="
            at += 1
        values = (value,) if equals else ()
        if not unknown_of(words[at - 1]):
            found.append(Setting(name=f"srun.{name}", values=values, file=file, line=line))
    return tuple(found)


def sbatch_settings(file: str, text: str) -> tuple[Setting, ...]:
    """`#SBATCH` lines as settings `sbatch.NAME`."""
    found: list[Setting] = []
    for line, each in enumerate(text.split("\n"), start=1):
        header = _SBATCH.match(each.strip())
        if header is None:
            continue
        words = header.group(1).partition(" #")[0].split()
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("-"):
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if not equals and at < len(words) and not words[at].startswith("-"):
                value, equals = words[at], "="
                at += 1
            if not word.startswith("--"):
                name = _SRUN_NAMES.get(name, name)
            values = (value,) if equals else ()
            found.append(Setting(name=f"sbatch.{name}", values=values, file=file, line=line))
    return tuple(found)


def settings_of(
    file: str, words: tuple[Field, ...]
) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """A program's arguments as settings, and those of which only the host knows a value.

    A flag has the words after it as values, up to the next one. A word `NAME:CHOICE` is a setting
    of its own, as torchtitan's `activation_checkpoint:full`.
    """
    found: list[Setting] = []
    unread: list[Setting] = []
    at = 0
    while at < len(words):
        text, line = text_of_field(words[at]), line_of_field(words[at])
        doubtful = bool(unknown_of(words[at]))
        at += 1
        chosen = _CHOICE.fullmatch(text)
        if chosen is not None and not doubtful:
            kept = Setting(name=chosen.group(1), values=(chosen.group(2),), file=file, line=line)
            found.append(kept)
            continue
        if not text.startswith("--") or len(text) < 3:
            kept = Setting(name="", values=(text,), file=file, line=line)
            (unread if doubtful else found).append(kept)
            continue
        name, equals, value = text[2:].partition("=")
        values = [value] if equals else []
        while at < len(words) and not equals:
            after = text_of_field(words[at])
            if _CHOICE.fullmatch(after):
                break
            if after.startswith("-") and _NUMBER.match(after) is None and after != "-":
                break
            if unknown_of(words[at]):
                # A list that stands alone may hold further flags; one value may be unknown.
                if values or after.endswith("[@]}"):
                    break
                doubtful = True
            values.append(after)
            at += 1
        kept = Setting(name=name, values=tuple(values), file=file, line=line)
        (unread if doubtful else found).append(kept)
    return tuple(found), tuple(unread)
