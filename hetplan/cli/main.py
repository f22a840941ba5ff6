"""The command line: which commands there are and what an error looks like to its user.

Every command is one module of this folder with one function. Errors become one line each on
stderr and the exit code of their class (hetplan/errors.py); a fault of hetplan itself becomes one
line too, with how to see the traceback.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

import typer

from hetplan.cli.bench import bench
from hetplan.cli.check import check
from hetplan.cli.compare import compare
from hetplan.cli.demo import demo
from hetplan.cli.doctor import doctor
from hetplan.cli.emit import emit
from hetplan.cli.emulate import app as emulate_app
from hetplan.cli.estimate import estimate
from hetplan.cli.explain import explain
from hetplan.cli.fit import fit
from hetplan.cli.import_file import import_
from hetplan.cli.launch import app as launch_app
from hetplan.cli.options import INTERRUPTED
from hetplan.cli.plan import plan
from hetplan.cli.profile import profile
from hetplan.errors import HetplanError
from hetplan.version import __version__

_P = ParamSpec("_P")
_R = TypeVar("_R")

TRACEBACK_VARIABLE = "HETPLAN_TRACEBACK"
MAX_LINES = 100
"""Lines of a fault that are printed: a generated file may have a million faults."""


def guarded(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """The command with hetplan's errors turned into messages and exit codes."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except HetplanError as error:
            lines = str(error).splitlines()
            for line in lines[:MAX_LINES]:
                _complain(line)
            if len(lines) > MAX_LINES:
                _complain(f"and {len(lines) - MAX_LINES:,} more like these")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of stdout went away; Python would complain again when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            _complain(f"{error.filename or 'input or output'}: {error.strerror or error}")
            _show_traceback()
            raise typer.Exit(1) from None
        except typer.Exit:
            raise
        except Exception as error:
            _complain(
                f"internal fault: {type(error).__name__}: {error} "
                f"(set {TRACEBACK_VARIABLE}=1 to see where, and please report it)"
            )
            _show_traceback()
            raise typer.Exit(1) from None

    return run


def _complain(line: str) -> None:
    print(f"hetplan: {line}", file=sys.stderr)


def _show_traceback() -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()


app = typer.Typer(
    name="hetplan",
    help="Profile, predict, plan and launch transformer training on accelerators that do not "
    "match.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Profile, predict, plan and launch training on accelerators that do not match."""


_COMMANDS = (
    doctor, profile, import_, check, fit, plan, estimate, explain, emit, compare,
    bench, demo,
)  # fmt: skip
for _command in _COMMANDS:
    app.command(_command.__name__.rstrip("_"))(guarded(_command))


def add_group(name: str, group: typer.Typer) -> None:
    """Mount a group of sub-commands, each of them guarded."""
    for command in group.registered_commands:
        if command.callback is not None:
            command.callback = guarded(command.callback)
    app.add_typer(group, name=name)


add_group("launch", launch_app)
add_group("emulate", emulate_app)


def main() -> None:
    """Run the command that the arguments name; hetplan/__main__.py calls it."""
    _end_like_ctrl_c()
    app()


def _end_like_ctrl_c() -> None:
    """A scheduler's or a closing terminal's request to end is a Ctrl-C to every command.

    So the best plan so far is written and no worker is left behind. A signal that the caller
    ignores (nohup) stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
