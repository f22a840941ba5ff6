"""launch.sh: starts the ranks of one host by torchrun's static rendezvous.

The script is the same on every host. It holds the list of all calls of torchrun in the order of
their node ranks, finds its host in it and makes that host's calls. Who runs it on every host does
not matter: pdsh, a step of Slurm, a pod of Kubernetes, a person.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.launch_domains import SSH_PORT, Scheduler
from hetplan.errors import Fault, InputError
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.quoting import (
    FOLDER,
    check_printable,
    comment,
    folder_word,
    hostlist,
    word,
    words,
)
from hetplan.schedulers.rank_layout import Agent, RankLayout, used_devices
from hetplan.schedulers.vendors import vendor_of

LAUNCH_FILE = "launch.sh"
RENDEZVOUS_SECONDS = 1800
"""How long the hosts that came first wait for the last one."""
_WIDTH = 98
_SEARCHED = ("PYTHONPATH",)
"""Variables that list folders: a host's own folders are searched after the launch's."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:-]+", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII)
_ADDRESS = re.compile(r"[0-9.:]+", re.ASCII)

Variables = tuple[tuple[str, str], ...]
_Settings = tuple[int, Variables, tuple[str, ...]]
"""Ranks of one call of torchrun, its own variables, its own arguments."""


def launch_files(
    ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> tuple[EmittedFile, ...]:
    """launch.sh; an InputError where agents of one host cannot be kept to their own devices."""
    text = launch_text(ranks, launch, options)
    return (EmittedFile(path=LAUNCH_FILE, text=text, executable=True),)


def start_lines(ranks: RankLayout, launch: TrainerLaunch) -> list[str]:
    """One line for a parallel shell, per ssh user and port."""
    lines = [
        "Run `bash launch.sh` on every host within half an hour (torchrun waits that long). "
        "With a parallel shell, from this folder:",
        "",
    ]
    hosts = sorted(ranks.hosts, key=lambda host: (host.domain.ssh_user, host.domain.ssh_port))
    for (user, port), group in groupby(
        hosts, key=lambda host: (host.domain.ssh_user, host.domain.ssh_port)
    ):
        names = hostlist([host.address for host in group])
        ports = "" if port == SSH_PORT else f"PDSH_SSH_ARGS_APPEND='-p {port}' "
        users = f" -l {user}" if user else ""
        command = "cd $PWD && bash launch.sh > log-%h.txt 2>&1"
        lines.append(f'    {ports}pdsh -R ssh{users} -w {word(names)} "{command}"')
    lines += [
        "",
        "`clush -w HOSTS` does the same. A host that is not called as in launch.sh is named: "
        "`bash launch.sh HOST`, or HETPLAN_HOST. Ctrl-C in pdsh twice, or `kill` of launch.sh, "
        "ends a host's ranks; when one host fails, the collectives of the others end in an error "
        "or at the trainer's timeout.",
    ]
    return lines


def launch_text(ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions) -> str:
    """The script that starts one host's ranks."""
    common, settings = _settings(ranks, launch)
    kinds = list(dict.fromkeys(settings))
    calls = [
        (_checked(agent.host.name), kinds.index(own) + 1)
        for agent, own in zip(ranks.agents, settings, strict=True)
    ]
    first = launch.program[0]
    inside = not (first == "-m" or first.startswith(("/", FOLDER)))
    return "".join(
        (
            "#!/usr/bin/env bash\n",
            f"# Starts this host's ranks of a job of {comment(launch.title)}.\n",
            _HEAD,
            f"python=${{HETPLAN_PYTHON:-{_default(options.python)}}}\n",
            f"trainer_folder={_trainer_folder(options, inside=inside)}\n\n",
            "# Calls of torchrun in the order of their node ranks: HOST/SETTINGS.\n",
            _array("calls", _call_words(calls)),
            "settings() { # ranks of one call, its own variables and arguments\n  case $1 in\n",
            *(_setting(number, own) for number, own in enumerate(kinds, start=1)),
            "  esac\n}\n\n",
            *(f"export {name}={_value(name, value)}\n" for name, value in common),
            f"program=({words(launch.program)})\n",
            _array("arguments", (words(flag) for flag in launch.arguments)),
            _body(ranks, [name for name, _ in calls]),
        )
    )


_HEAD = """\
#   bash launch.sh [HOST]    HOST: this host's name in `calls`; default: HETPLAN_HOST or hostname
set -euo pipefail
folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
host=${1:-${HETPLAN_HOST:-${SLURMD_NODENAME:-$(hostname)}}}
"""
_BODY = """\
unset "${!PET_@}" # defaults of torchrun, which some operators set for another numbering
[[ -z $trainer_folder ]] || cd -- "$trainer_folder"
trap 'kill $(jobs -p) 2> /dev/null || true; wait || true' EXIT # when one call fails, the others end
trap 'exit 143' TERM
trap 'exit 130' INT HUP
started=0
for node_rank in "${!calls[@]}"; do
  call=${calls[node_rank]}
  [[ SAME_HOST ]] || continue
  settings "${call##*/}"
  env ${variables[@]+"${variables[@]}"} "$python" -m torch.distributed.run \\
    --nnodes="${#calls[@]}" --nproc-per-node="$ranks" --node-rank="$node_rank" \\
    --rdzv-backend=static --rdzv-conf=timeout=SECONDS --master-addr=ADDRESS --master-port=PORT \\
    "${program[@]}" ${arguments[@]+"${arguments[@]}"} ${own[@]+"${own[@]}"} &
  started=$((started + 1))
done
if ((started == 0)); then
  echo "hetplan: no ranks are planned on $host; name the host: bash launch.sh HOST" >&2
  exit 2
fi
for ((; started > 0; started--)); do wait -n; done
"""


def _body(ranks: RankLayout, names: Sequence[str]) -> str:
    """The part that makes this host's calls.

    Hosts are compared up to the first dot where that tells them apart: machines call themselves by
    short or by full names.
    """
    hosts = dict.fromkeys(names)
    short = {name.partition(".")[0] for name in hosts}
    exact = len(short) < len(hosts) or any(_ADDRESS.fullmatch(name) for name in hosts)
    same = '${call%/*} == "$host"' if exact else '${call%%[./]*} == "${host%%.*}"'
    body = _BODY.replace("SAME_HOST", same).replace("SECONDS", str(RENDEZVOUS_SECONDS))
    return body.replace("ADDRESS", word(ranks.master.address)).replace("PORT", str(ranks.port))


def _array(name: str, texts: Iterable[str]) -> str:
    """An array of words that are quoted already, several to a line, no text broken."""
    lines, line = [], ""
    for text in texts:
        if line and len(line) + 1 + len(text) > _WIDTH - 2:
            lines.append(line)
            line = ""
        line = f"{line} {text}" if line else text
    lines += [line] if line else []
    return f"{name}=(\n" + textwrap.indent("\n".join(lines), "  ") + "\n)\n"


def _call_words(calls: Sequence[tuple[str, int]]) -> Iterator[str]:
    """`HOST/SETTINGS`, runs of numbered hosts as bash writes them: `node{01..12}/1`."""
    run: list[tuple[str, str]] = []  # (text before the number, digits)
    kind = 0
    for name, number in (*calls, ("", 0)):
        found = _NUMBERED.fullmatch(name)
        follows = (
            run
            and found is not None
            and number == kind
            and found[1] == run[-1][0]
            and len(found[2]) == len(run[-1][1])
            and int(found[2]) == int(run[-1][1]) + 1
        )
        if run and not follows:
            yield _run_text(run, kind)
            run = []
        if found is not None:
            run.append((found[1], found[2]))
            kind = number
        elif name:
            yield f"{name}/{number}"


def _run_text(run: Sequence[tuple[str, str]], kind: int) -> str:
    before, first = run[0]
    last = run[-1][1]
    return f"{before}{first}/{kind}" if len(run) == 1 else f"{before}{{{first}..{last}}}/{kind}"


def _setting(number: int, own: _Settings) -> str:
    count, variables, arguments = own
    given = " ".join(f"{name}={folder_word(value)}" for name, value in variables)
    return f"    {number}) ranks={count} variables=({given}) own=({words(arguments)}) ;;\n"


def _checked(name: str) -> str:
    if not _HOST.fullmatch(name):
        raise InputError(f"{name[:60]!a} cannot stand in {LAUNCH_FILE}: rename the host")
    return name


def _default(text: str) -> str:
    """A word as the default of a parameter expansion, where single quotes do not protect it."""
    quoted = word(text)
    return quoted if quoted == text else f"$(printf %s {quoted})"


def _trainer_folder(options: EmissionOptions, *, inside: bool) -> str:
    if options.trainer_folder:
        return folder_word(options.trainer_folder)
    if inside:
        return "${TRAINER_FOLDER:?set it to the folder of the trainer}"
    return "${TRAINER_FOLDER:-}"


def _value(name: str, value: str) -> str:
    own = f'"${{{name}:+:${name}}}"' if name in _SEARCHED else ""
    return folder_word(value) + own


# ---- what differs between agents


def _settings(ranks: RankLayout, launch: TrainerLaunch) -> tuple[Variables, list[_Settings]]:
    """(variables of all agents, settings of each agent in the order of node ranks)."""
    given = launch.agent_environment or ((),) * len(ranks.agents)
    used = used_devices(ranks)
    variables = [
        _last_values((*launch.environment, *own, *_pod_devices(agent, used[agent.host.name])))
        for agent, own in zip(ranks.agents, given, strict=True)
    ]
    _check_apart(ranks, variables)
    common = tuple(pair for pair in variables[0] if all(pair in each for each in variables))
    arguments = launch.agent_arguments or ((),) * len(ranks.agents)
    return common, [
        (
            agent.num_ranks,
            tuple(pair for pair in own if pair not in common),
            tuple(text for flag in flags for text in flag),
        )
        for agent, own, flags in zip(ranks.agents, variables, arguments, strict=True)
    ]


def _last_values(variables: Variables) -> Variables:
    """Every variable once, with its last value."""
    for name, value in variables:
        if not _VARIABLE.fullmatch(name):
            raise InputError(f"{name[:60]!a} is no name of an environment variable")
        check_printable(value)
    return tuple(dict(variables).items())


def _pod_devices(agent: Agent, used: tuple[int, ...]) -> Variables:
    """Visible devices of one of several agents in a pod, which counts its own devices from 0."""
    host = agent.host
    visible = vendor_of(host.vendor, host.device_kind).visible
    pods = host.domain.scheduler is Scheduler.KUBERNETES
    if not pods or not visible or agent.local_devices == used:
        return ()
    return ((visible, ",".join(str(used.index(device)) for device in agent.local_devices)),)


def _check_apart(ranks: RankLayout, own: Sequence[Variables]) -> None:
    """Agents of one host see their own devices only, by a variable that their software reads."""
    counts = Counter(agent.host.name for agent in ranks.agents)
    for agent, variables in zip(ranks.agents, own, strict=True):
        host = agent.host
        visible = vendor_of(host.vendor, host.device_kind).visible
        if counts[host.name] < 2 or host.device_kind == CPU_KIND:
            continue
        if not visible or visible not in dict(variables):
            message = (
                f"host {host.name} runs {counts[host.name]} agents, each on some of its devices, "
                f"and no variable is known by which {host.vendor}'s software shows a process only "
                "some: pin tp, or the stages' devices, so that ranks of a host follow each other"
            )
            raise InputError(Fault(field="plan.pipelines", message=message))
