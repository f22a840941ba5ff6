"""A launch script, or a list of arguments, as settings: what torchrun and the trainer are given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hetplan.errors import Fault, InputError
from hetplan.importers.launches.commands import (
    TrainerCall,
    blank_end,
    sbatch_settings,
    settings_of,
    srun_settings,
    stray_flag,
    trainer_call,
)
from hetplan.importers.launches.flags import GIVEN_FILE
from hetplan.importers.launches.plain_list import is_plain_list, plain_words
from hetplan.importers.launches.shell import Walk, walk_script
from hetplan.importers.launches.shell_values import Field, text_of_field, unknown_of
from hetplan.importers.launches.values import LaunchHost, LaunchText, Setting
from hetplan.importers.lines import fault_at, shown, whole_number

Given = tuple[tuple[str, str], ...]
"""(name, value) of `--set`: variables of a script, or settings over those that stand there."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,3}", re.ASCII)
_WINDOWS = "{}: its lines end as those of Windows do, with which bash does not run it as it is read"
_COUNTS = ("nnodes", "nproc-per-node")
_LIST = "arguments"
"""The list in which hetplan's own scripts keep the trainer's arguments."""


def script_launch(
    trainer: str,
    file: str,
    text: str,
    given: Given = (),
    hosts: tuple[LaunchHost, ...] = (),
    *,
    emitted: bool = False,
) -> LaunchText:
    """What a script, or a file of nothing but arguments, gives its trainer.

    `emitted`: by hetplan, whose scripts keep the arguments in a list. An InputError where it starts
    no trainer, several different ones, or cannot be read.
    """
    windows = "\r\n" in text
    text = text.replace("\r\n", "\n")
    variables = {name: value for name, value in given if _IDENTIFIER.fullmatch(name)}
    _check_given(file, text, variables)
    plain = is_plain_list(text)
    walk = walk_script(file, "" if plain else text, variables)
    arguments = plain_words(file, text, variables) if plain else ()
    if emitted:
        arguments = _kept_list(walk)
    call = None if arguments else _call(file, walk)
    if call is not None:
        arguments = call.arguments
    ends = () if call is None else (blank_end(file, call.command),)
    found = (*ends, *(stray_flag(file, each) for each in walk.commands))
    stray = tuple(dict.fromkeys(each for each in found if each is not None))
    if call is None and not arguments:
        raise _no_trainer(file, stray)
    settings, unread = settings_of(file, arguments)
    launcher = _launcher(file, text, walk, call)
    program: tuple[Setting, ...] = ()
    if call is not None:
        line = call.command.line
        program = (Setting(name="program", values=(call.program,), file=file, line=line),)
    every = (*program, *launcher, *settings, *_given_settings(given))
    return LaunchText(
        trainer=trainer,
        settings=every,
        environment=_environment(file, walk.exports() if call is None else call.command.exported),
        hosts=hosts,
        nodes=_count(every, "torchrun.nnodes", call, ("srun.nodes", "sbatch.nodes")),
        devices_per_node=_devices_per_node(every, call),
        unread=(*unread, *(() if call is None else call.unread)),
        remarks=(
            *((_WINDOWS.format(file),) if windows else ()),
            *_remarks(file, walk, arguments, call),
        ),
        stray=stray,
    )


def _no_trainer(file: str, stray: tuple[Setting, ...]) -> InputError:
    if stray:
        first = stray[0]
        message = (
            f"starts no trainer that is known here: bash runs --{first.name} as a command of its "
            "own, as the line before it ends there; see whether a blank follows its backslash"
        )
        return fault_at(file, first.line, message)
    return fault_at(
        file,
        0,
        "starts no trainer that is known here: torchrun, python -m torch.distributed.run, or "
        "python with a script named ...train...py; a file of nothing but arguments is read too",
    )


def _remarks(
    file: str, walk: Walk, arguments: tuple[Field, ...], call: TrainerCall | None
) -> Iterator[str]:
    """What was left alone and may have changed what the trainer is given."""
    words = (*arguments, *(() if call is None else call.command.words))
    unknown = {piece.unknown for word in words for piece in word if piece.unknown}
    for each in dict.fromkeys(walk.remarks):
        if not each.names or unknown.intersection(each.names):
            names = ", ".join(sorted(unknown.intersection(each.names)))
            yield f"{file}:{each.line}: {each.text}" + (f": {names}" if names else "")


def _check_given(file: str, text: str, variables: dict[str, str]) -> None:
    """Names of `--set` that the script does not use are slips of the pen."""
    known = (*_COUNTS, "WORLD_SIZE")
    faults = [
        Fault(
            file=GIVEN_FILE,
            field=name,
            message=f"{file} has no such variable; flags are set by their names with dashes, as in "
            "--set tensor-model-parallel-size=8",
        )
        for name in variables
        if name not in known and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is None
    ]
    if faults:
        raise InputError(*faults)


def _given_settings(given: Given) -> tuple[Setting, ...]:
    found: list[Setting] = []
    for at, (name, value) in enumerate(given, start=1):
        if name in _COUNTS:
            name = f"torchrun.{name}"
        elif _IDENTIFIER.fullmatch(name) and name != "WORLD_SIZE":
            continue
        values = () if value.lower() == "true" else (value,)
        found.append(Setting(name=name, values=values, file=GIVEN_FILE, line=at))
    return tuple(found)


def _call(file: str, walk: Walk) -> TrainerCall | None:
    """The one trainer that the script starts; sure ones go before those in loops and choices."""
    calls = [each for each in (trainer_call(file, c) for c in walk.commands) if each is not None]
    sure = [each for each in calls if each.command.sure] or calls
    different: dict[tuple[str, ...], TrainerCall] = {}
    for each in sure:
        different[tuple(map(text_of_field, each.arguments))] = each
    if len(different) > 1:
        lines = ", ".join(str(each.command.line) for each in different.values())
        raise fault_at(
            file,
            [*different.values()][1].command.line,
            f"starts several trainers with different arguments, on lines {lines[:80]}; keep one in "
            "a copy of the file",
        )
    return next(iter(different.values()), None)


def _kept_list(walk: Walk) -> tuple[Field, ...]:
    value = walk.variables.get(_LIST)
    return value.items if value is not None and value.array else ()


def _environment(file: str, exported: Iterable[tuple[str, Field, int]]) -> tuple[Setting, ...]:
    return tuple(
        Setting(name=name, values=(text_of_field(value),), file=file, line=line)
        for name, value, line in exported
        if not unknown_of(value)
    )


def _launcher(file: str, text: str, walk: Walk, call: TrainerCall | None) -> tuple[Setting, ...]:
    """Options of the launchers around the trainer."""
    header = sbatch_settings(file, text)
    if call is None:
        return header
    if any(each.name.startswith("srun.") for each in call.launcher):
        return (*header, *call.launcher)
    around = [setting for each in walk.commands for setting in srun_settings(file, each.words)]
    return (*header, *around, *call.launcher)


def last_of(settings: Iterable[Setting], name: str) -> Setting | None:
    """The last setting of this name."""
    found = None
    for each in settings:
        if each.name == name:
            found = each
    return found


def _count(
    settings: tuple[Setting, ...],
    name: str,
    call: TrainerCall | None,
    others: tuple[str, ...],
) -> int | None:
    """A number of nodes; None where it is not said, or is a range."""
    setting = last_of(settings, name)
    if setting is not None and setting.values:
        # torchrun takes a range, MIN:MAX, for jobs whose size may change.
        parts = set(setting.values[0].split(":"))
        return _number(setting, parts.pop()) if len(parts) == 1 else None
    for other in others:
        setting = last_of(settings, other)
        if setting is not None and setting.values and setting.values[0].isdecimal():
            return _number(setting, setting.values[0])
    # torch/distributed/run.py: --nnodes is 1:1 where nobody gives it.
    return 1 if call is not None and call.torchrun and not call.unread else None


def _devices_per_node(settings: tuple[Setting, ...], call: TrainerCall | None) -> int | None:
    setting = last_of(settings, "torchrun.nproc-per-node")
    if setting is not None and setting.values:
        # Or a word: gpu, cpu, auto.
        return _number(setting, setting.values[0]) if setting.values[0].isdecimal() else None
    if call is not None and call.torchrun:
        return None if call.unread else 1  # its default
    for name in ("srun.ntasks-per-node", "sbatch.ntasks-per-node"):
        setting = last_of(settings, name)
        if setting is not None and setting.values and setting.values[0].isdecimal():
            return _number(setting, setting.values[0])
    return None


def _number(setting: Setting, text: str) -> int:
    number = whole_number(text)
    if number is None or not 1 <= number <= 1 << 21:
        message = f"{shown(text)}; a whole number from 1 on is expected here"
        raise fault_at(setting.file, setting.line, message, setting.name)
    return number
