"""What runs on one host: its agents, after all hosts have come?

`start-here.sh` is made of the plan's settings, written here, and a body that is the same for every
plan (`start_here.sh`). What differs by agent stands in tables (`tables`).
"""

from __future__ import annotations

from pathlib import Path

from hetplan.emitters.quoting import FOLDER, comment, folder_word, word, words
from hetplan.emitters.schedulers.tables import Tables
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch

START_HERE_FILE = "start-here.sh"
_SEARCHED = ("PYTHONPATH",)
"""Variables of folders to search: a container's own ones are searched after the launch's."""

_PURPOSE = """\
# Every host runs it: it finds the host's agents in agents.tsv, waits at the barrier until all hosts
# have come, and starts torchrun once for each agent. When one fails all agents of the host are
# ended. Logs: logs/HOST-agentN.log.
"""
SCRIPT_HEAD = "#!/usr/bin/env bash\n"
FIND_FOLDER = (
    'folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit 1\n'
    "if [[ $folder == *[[:cntrl:]]* ]]; then echo 'hetplan: move this folder' >&2; exit 1; fi\n"
)


def start_here_text(
    sheet: LaunchSheet, launch: TrainerLaunch, tables: Tables, options: EmitOptions
) -> str:
    """The script that starts one host's agents."""
    return "".join(
        (
            SCRIPT_HEAD,
            f"# Starts this host's part of a job of {comment(launch.title)}.\n",
            _PURPOSE,
            "set -uo pipefail\n",
            FIND_FOLDER,
            "\n",
            *_settings(sheet, tables, options),
            _trainer_folder(launch, options),
            "\n",
            *_environment(tables),
            f"program=({words(launch.program)})\n",
            "arguments=(\n",
            *(f"  {words(flag)}\n" for flag in launch.arguments),
            ")\n\n",
            body("children.sh"),
            body("start_here.sh"),
        )
    )


def body(name: str) -> str:
    """Text of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _settings(sheet: LaunchSheet, tables: Tables, options: EmitOptions) -> tuple[str, ...]:
    return (
        f"nnodes={len(sheet.agents)} # agents: calls of torchrun on all hosts\n",
        f"master_address={word(sheet.master.address)}\n",
        f"master_port={sheet.port}\n",
        f"barrier_port={sheet.barrier_port}\n",
        f"token={tables.token} # of this job at its barrier\n",
        f"python=${{HETPLAN_PYTHON:-{_default(options.python)}}}\n",
    )


def _default(text: str) -> str:
    """A word as the default of a parameter expansion, where single quotes do not protect it."""
    quoted = word(text)
    return quoted if quoted == text else f"$(printf %s {quoted})"


def _trainer_folder(launch: TrainerLaunch, options: EmitOptions) -> str:
    first = launch.program[0]
    inside = not (first == "-m" or first.startswith(("/", FOLDER)))
    value = folder_word(options.trainer_folder) if options.trainer_folder else "${TRAINER_FOLDER:-}"
    return f"trainer_folder={value}\nprogram_is_in_folder={'yes' if inside else 'no'}\n"


def _environment(tables: Tables) -> tuple[str, ...]:
    return (
        *(f"export {name}={_value(name, value)}\n" for name, value in tables.common),
        *(("\n",) if tables.common else ()),
    )


def _value(name: str, value: str) -> str:
    """A variable's value; before a host's own, where it is a list of folders to search."""
    own = f'"${{{name}:+:${name}}}"' if name in _SEARCHED else ""
    return folder_word(value) + own
