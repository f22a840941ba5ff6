"""The command line: which commands there are and what an error looks like to its user.

Every command is one module of this folder, in the table ENTRIES, and is imported when it is called:
`hetplan --help` answers at once. Errors become one line each on stderr and the exit code of their
class (hetplan/errors.py).
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from hetplan.cli.options import INTERRUPTED, tell
from hetplan.errors import Fault, HetplanError, InputError, LimitError
from hetplan.interrupts import interrupt, interrupts_wait
from hetplan.version import __version__

_P = ParamSpec("_P")
_R = TypeVar("_R")

TRACEBACK_VARIABLE = "HETPLAN_TRACEBACK"


def guarded(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """The command with hetplan's errors turned into messages and exit codes."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with interrupts_wait():
                return command(*args, **kwargs)
        except InputError as error:
            tell(*error.faults)
            raise typer.Exit(error.exit_code) from None
        except HetplanError as error:
            tell(*(Fault(message=line) for line in str(error).splitlines()))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            tell(Fault(message="interrupted"))
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of stdout went away; Python would complain again when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except typer.Exit:
            raise
        except Exception as error:
            tell(_fault_of(error))
            _show_traceback()
            raise typer.Exit(LimitError.exit_code if _no_memory(error) else 1) from None

    return run


def _fault_of(error: Exception) -> Fault:
    """What went wrong, which nobody meant."""
    if _no_memory(error):
        return Fault(message=NO_MEMORY)
    if isinstance(error, OSError):
        place = error.filename or "input or output"
        return Fault(file=str(place), message=error.strerror or str(error))
    return Fault(message=_explain(error))


def _no_memory(error: BaseException | None) -> bool:
    """Whether it, or what it came of, is want of memory."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    text = str(error).lower()
    return any(words in text for words in _NO_MEMORY_WORDS) or _no_memory(error.__context__)


NO_MEMORY = "not enough memory (`ulimit -v` shows a limit); what was written before is kept"
_NO_MEMORY_WORDS = (
    "not enough memory",  # torch
    "out of memory",
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",  # the loader of shared libraries
    "can't start new thread",
)
"""How libraries that raise no MemoryError say the same."""


EXTRAS = {
    "torch": "this command measures or trains: pip install 'hetplan[torch]'",
    "matplotlib": "this command draws: pip install 'hetplan[plots]'",
    "megatron": "this command needs megatron-core: pip install 'hetplan[megatron]'",
}
"""Libraries that only some commands need, by import name."""


def _explain(error: Exception) -> str:
    """What a missing extra or an internal fault means for the user."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        missing = EXTRAS.get(error.name.partition(".")[0])
        if missing is not None:
            return missing
    return (
        f"internal fault: {type(error).__name__}: {error} "
        f"(set {TRACEBACK_VARIABLE}=1 to see where, and please report it)"
    )


def _show_traceback() -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()


DESCRIBE, PLAN, TRAIN = "Describe and measure", "Plan", "Train and compare"


LISTS = {"--nodes", "--between"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of `hetplan --help`; the command's module is imported when it is called.

    The module has a Typer named `app`, for a command with sub-commands, and then DEFAULT_COMMAND,
    where one of them can be left out; or a function of the command's name.
    """

    name: str
    panel: str
    help: str
    """At most 60 characters."""
    module: str = ""
    """In `hetplan.cli`; left out: the command's name."""


ENTRIES = (
    Entry(name="init", panel=DESCRIBE, help="Write a cluster, model and job file to begin with."),
    Entry(name="doctor", panel=DESCRIBE, help="Show what this machine has and can measure."),
    Entry(name="profile", panel=DESCRIBE, help="Measure layers, operators and links."),
    Entry(
        name="import",
        panel=DESCRIBE,
        help="Read measurements, topologies and launches of other tools.",
        module="import_file",
    ),
    Entry(name="check", panel=DESCRIBE, help="Find what is impossible or doubtful in files."),
    Entry(name="fit", panel=PLAN, help="Fit a predictor to measurements."),
    Entry(name="plan", panel=PLAN, help="Find the fastest plan for a job on a cluster."),
    Entry(name="replan", panel=PLAN, help="Find the next plan when nodes come, go or change."),
    Entry(name="advise", panel=PLAN, help="Rank what could be bought by what it brings."),
    Entry(name="sweep", panel=PLAN, help="Plan a grid of questions into one table."),
    Entry(name="estimate", panel=PLAN, help="Price a layout or a plan without a search."),
    Entry(name="explain", panel=PLAN, help="Show what limits a plan and what would help."),
    Entry(name="report", panel=PLAN, help="Write a page about plans that a team looks at."),
    Entry(name="verify", panel=PLAN, help="Check a plan file and its proof without the search."),
    Entry(name="emit", panel=TRAIN, help="Write the files that start a plan under a trainer."),
    Entry(name="launch", panel=TRAIN, help="Train a plan with the reference trainer."),
    Entry(name="compare", panel=TRAIN, help="Compare the logs of a run with its plan."),
    Entry(name="emulate", panel=TRAIN, help="Emulate a cluster on this Linux machine."),
    Entry(name="demo", panel=TRAIN, help="Run the whole loop on this machine."),
)


class _PanelHelp(TyperCommand):
    """A command whose help lists its options by `rich_help_panel`, in plain text.

    typer's own panels need 0.2 s to import rich's markdown.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words after one of LISTS are all its values: `--nodes A B`, as `--nodes A --nodes B`."""
        lists = {
            name
            for param in self.params
            if getattr(param, "multiple", False)
            for name in param.opts
        } & LISTS
        spread: list[str] = []
        option = ""
        for word in args:
            if word.startswith("-"):
                option = word if word in lists else ""
            elif option and spread[-1] != option:
                spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class _PanelGroup(TyperGroup):
    """A group of commands with the same help."""

    default_command = ""
    """Called where the first argument is none of the commands; empty: that is an error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = {*self.commands, *ctx.help_option_names}
        if self.default_command and args and args[0] not in named:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class _LazyGroup(_PanelGroup):
    """`hetplan` itself: the commands of ENTRIES, imported one by one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for entry in ENTRIES:
            self.add_command(TyperCommand(entry.name, help=entry.help, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel in dict.fromkeys(entry.panel for entry in ENTRIES):
            with formatter.section(panel):
                formatter.write_dl(
                    [(entry.name, entry.help) for entry in ENTRIES if entry.panel == panel]
                )


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments first, then the options by panel, in the order of the signature."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        is_argument = param.param_type_name == "argument"
        title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
        if record is not None:
            panels.setdefault(title, []).append(record)
    for title, records in panels.items():
        with formatter.section(title):
            formatter.write_dl(records)


@functools.cache
def load_command(name: str) -> Any:
    """The click command of this name, with every function of it guarded."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    module = import_module(f"hetplan.cli.{entry.module or entry.name}")
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    holder.callback()(lambda: None)
    if hasattr(module, "app"):
        _guard(module.app)
        holder.add_typer(module.app, name=name, cls=_PanelGroup)
    else:
        function = getattr(module, name if hasattr(module, name) else f"{name}_")
        holder.command(name, cls=_PanelHelp)(guarded(function))
    command: Any = typer.main.get_group(holder).commands[name]
    if hasattr(module, "DEFAULT_COMMAND"):
        command.default_command = module.DEFAULT_COMMAND
    return command


def _guard(group: typer.Typer) -> None:
    for command in group.registered_commands:
        if command.callback is not None:
            command.callback, command.cls = guarded(command.callback), _PanelHelp
    for sub_group in group.registered_groups:
        if sub_group.typer_instance is not None:
            sub_group.cls = _PanelGroup
            _guard(sub_group.typer_instance)


app = typer.Typer(
    name="hetplan",
    cls=_LazyGroup,
    help="Profile, predict, plan and launch transformer training on accelerators that do not "
    "match.",
    no_args_is_help=True,
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


def main() -> None:
    """Run the command that the arguments name; hetplan/__main__.py calls it."""
    _open_closed_streams()
    _one_thread_in_little_space()
    end_like_ctrl_c()
    # Whatever a command and its programs write, nobody but its owner and group may change.
    os.umask(os.umask(0) | stat.S_IWOTH)
    app()


def _open_closed_streams() -> None:
    """Let standard streams that the caller closed (`2>&-`) end nowhere: the next file that is
    opened would take their place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _one_thread_in_little_space() -> None:
    """Where address space is limited OpenBLAS has one thread: it takes some 30 MB for each when it
    is loaded, and ends the process where it cannot.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def end_like_ctrl_c() -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does.

    The best plan so far is written and no worker is left behind. A signal that the caller
    ignores (nohup) stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)
