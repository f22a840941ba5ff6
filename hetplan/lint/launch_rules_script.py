"""Does a trainer get all that its script writes for it, and what it cannot start without?

Sources: the bash manual, 3.1.2.1 (a backslash quotes the one character after it); Megatron-LM
megatron/training/arguments.py (validate_args: required_args), read, not run.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, seen

_NEEDED = {
    "num-layers": ("encoder-num-layers", "hybrid-layer-pattern", "hybrid-override-pattern"),
    "hidden-size": (),
}
"""Flags that Megatron-LM does not start without, and others that stand for them."""
_GIVE_THEM = ("yaml-cfg", "use-checkpoint-args", "use-mp-args-from-checkpoint-args")
"""Flags by which a file gives the sizes."""
_MAX_SHOWN = 4


def _stray(launch: Launch) -> Iterator[Seen]:
    flags = launch.text.stray
    if not flags:
        return
    named = [each for each in flags if each.name]
    if not named:
        yield seen(
            "a blank follows the backslash at the end of this line: the trainer's arguments end "
            "here, and bash runs the next line as a command of its own",
            *flags,
        )
        return
    names = ", ".join(f"--{each.name}" for each in named[:_MAX_SHOWN])
    more = f" and {len(named) - _MAX_SHOWN} more" if len(named) > _MAX_SHOWN else ""
    yield seen(
        f"bash runs {names}{more} as a command of its own: the trainer's arguments end before it, "
        "and it gets neither this flag nor those after it",
        *named,
    )


def _missing(launch: Launch) -> Iterator[Seen]:
    """Sizes without a default; only of a script, as a file of arguments may be one of several."""
    program = launch.program
    if launch.text.trainer != "megatron" or program is None or launch.is_open:
        return
    if any(map(launch.may_have, _GIVE_THEM)):
        return
    lacks = [
        name for name, others in _NEEDED.items() if not any(map(launch.may_have, (name, *others)))
    ]
    if lacks:
        yield seen(
            f"no {' and no '.join('--' + name for name in lacks)} among the arguments of "
            f"{program.values[0]:.60}: Megatron-LM stops without, unless the program fills it in; "
            "see whether the arguments end early",
            program,
        )


RULES = (
    launch_rule(
        id="launch-flag-is-a-command",
        severity=Severity.ERROR,
        title="a flag that bash runs as a command",
        explanation="A command ends with its line. A backslash continues it only as the very last "
        "character: with a blank after it, bash passes the blank on and takes the next line for a "
        "new command. A text of several lines that stands in bash -c does the same at each line "
        "break.",
        advice="Remove the blanks after the backslash; in bash -c, keep the arguments in one line "
        "or end each with a backslash.",
        look=_stray,
    ),
    launch_rule(
        id="launch-without-sizes",
        severity=Severity.WARNING,
        title="a launch of Megatron-LM without the sizes of a model",
        explanation="Megatron-LM has no default for --num-layers and --hidden-size and stops "
        "without them. Where they are written in the script, the arguments end before they come, "
        "or a list with them is not used.",
        advice="Write them, or mend what cuts the arguments off.",
        look=_missing,
    ),
)
