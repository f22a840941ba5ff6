"""A trainer's flag under every spelling in which launches have it, and its value as a number.

`tensor-model-parallel-size` of a command line is `train.system.tensor_model_parallel_size` in
FlagScale's YAML, whose runner flattens keys to flags (flagscale/runner/utils.py,
flatten_dict_to_args: true is a flag alone, false and lists of nothing are no flag).
"""

from __future__ import annotations

from hetplan.errors import Fault, InputError
from hetplan.importers.launches.values import LaunchText, Setting
from hetplan.importers.lines import shown, whole_number

GIVEN_FILE = "--set"
"""File of the settings that stand on hetplan's own command line; they count over all others."""


def flag_name(setting: Setting) -> str:
    """The setting's name as a flag: the last part of a dotted name, with dashes."""
    return setting.name.rpartition(".")[2].replace("_", "-")


def flag(text: LaunchText, *names: str) -> Setting | None:
    """The setting that counts, of any of these flags; None where there is none, or it is false.

    An InputError where only the host knows what it is.
    """
    found = _last(text.settings, names)
    unknown = _last(text.unread, names)
    if unknown is not None and (found is None or found.file != GIVEN_FILE):
        raise InputError(not_known(unknown))
    return None if found is None or _is_false(found) else found


def _last(settings: tuple[Setting, ...], names: tuple[str, ...]) -> Setting | None:
    found = None
    for each in settings:
        if not each.name.startswith(("torchrun.", "srun.", "sbatch.", "experiment.")):
            found = each if flag_name(each) in names else found
    return found


def _is_false(setting: Setting) -> bool:
    return setting.values in (("false",), ("null",), ("none",))


def not_known(setting: Setting) -> Fault:
    """That the value of a setting is not in the launch, and how to give it."""
    word = setting.values[-1] if setting.values else setting.name
    name = word.strip("\"'").removeprefix("$").strip("{}").partition(":")[0]
    if not name.isidentifier() and not name.isdecimal():
        name = setting.name if "." in setting.name else flag_name(setting)
    give = f"--set {name}=VALUE"
    return Fault(
        file=setting.file,
        line=setting.line,
        field=setting.name,
        message=f"{shown(word)} is known to the host only; give it with {give}",
    )


def number_of(text: LaunchText, default: int | None, *names: str, least: int = 1) -> int | None:
    """The whole number of a flag; the default where it is not there."""
    setting = flag(text, *names)
    if setting is None:
        return default
    number = whole_number(setting.values[0]) if len(setting.values) == 1 else None
    if number is None or not least <= number <= 10**15:
        raise InputError(wrong(setting, f"a whole number from {least} on"))
    return number


def count_of(text: LaunchText, default: int, *names: str) -> int:
    """The same where there is a default."""
    found = number_of(text, default, *names)
    return default if found is None else found


def fraction_of(text: LaunchText, default: float, *names: str) -> float:
    """The number of a flag."""
    setting = flag(text, *names)
    if setting is None:
        return default
    try:
        found = float(setting.values[0]) if len(setting.values) == 1 else -1.0
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e300:
        raise InputError(wrong(setting, "a number from 0 on"))
    return found


def word_of(text: LaunchText, default: str, *names: str) -> str:
    """The word of a flag."""
    setting = flag(text, *names)
    if setting is None:
        return default
    if len(setting.values) != 1:
        raise InputError(wrong(setting, "one word"))
    return setting.values[0]


def is_set(text: LaunchText, *names: str) -> bool:
    """Whether a flag without value is there."""
    return flag(text, *names) is not None


def wrong(setting: Setting, wanted: str) -> Fault:
    """That a setting is not what it must be."""
    found = " ".join(setting.values)
    return Fault(
        file=setting.file,
        line=setting.line,
        field=setting.name,
        message=f"found {shown(found)} where {wanted} is expected",
    )


def fault_of(setting: Setting | None, text: LaunchText, message: str) -> Fault:
    """A fault at a setting; at the launch's file where there is no such setting."""
    if setting is not None:
        return Fault(file=setting.file, line=setting.line, field=setting.name, message=message)
    file = next((each.file for each in text.settings), "")
    return Fault(file=file, message=message)
