"""Which job script starts the hosts of a Slurm domain?

One task per node runs start-here.sh, which finds its agents by the node's name: Slurm sorts the
nodes of a job, so its task numbers say nothing about ranks. Nodes with unlike devices are
components of one heterogeneous job, each with its own step.

Options: sbatch(1) and srun(1) of Slurm. `--exclusive` gives a job all devices of its nodes but only
the memory that it asks for, so `--mem=0`; `--cpu-bind=none` because a step of one task per node may
otherwise be bound to one core. `--container-image` is pyxis' (github.com/NVIDIA/pyxis), whose
images are written `REGISTRY#NAME` (enroot, doc/cmd/import.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.emitters.quoting import comment, word
from hetplan.emitters.schedulers.start import SCRIPT_HEAD
from hetplan.emitters.schedulers.tables import uniform_groups
from hetplan.emitters.sheet import Host, LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch

_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})", re.ASCII)
"""Of a name that ends with a number; others are listed whole."""
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


def slurm_file(domain: LaunchDomain) -> str:
    """Name of a domain's job script."""
    return f"slurm-{domain.name}.sbatch"


def slurm_text(
    sheet: LaunchSheet, launch: TrainerLaunch, domain: LaunchDomain, options: EmitOptions
) -> str:
    """The job script of a domain."""
    groups = uniform_groups(sheet, domain.name)
    directives: list[str] = []
    for number, hosts in enumerate(groups):
        directives += ["#SBATCH hetjob\n"] if number else []
        directives += [f"#SBATCH {each}\n" for each in _directives(domain, hosts)]
    steps = (_step(domain, hosts, at, len(groups)) for at, hosts in enumerate(groups))
    mounted = word(options.trainer_folder) if options.trainer_folder else '"${TRAINER_FOLDER:-}"'
    return "".join(
        (
            SCRIPT_HEAD,
            *directives,
            "#\n",
            f"# The part of domain {domain.name} of a job of {comment(launch.title)}.\n",
            f"# Submit it in this folder: sbatch {slurm_file(domain)}\n",
            "set -uo pipefail\n",
            "# Slurm runs a copy of this script: the folder is where it was submitted.\n",
            "folder=${HETPLAN_FOLDER:-$SLURM_SUBMIT_DIR}\n",
            f"domain={domain.name}\n",
            f"trainer_folder={mounted}\n",
            _BEFORE,
            *steps,
            _AFTER,
        )
    )


_BEFORE = """\
if [[ ! -f $folder/start-here.sh ]]; then
  echo "hetplan: start-here.sh is not in $folder: submit this script in its folder" >&2
  exit 2
fi
mkdir -p -- "$folder/logs"
rm -f -- "$folder/logs/$domain.status"
mounts=$folder:$folder${trainer_folder:+,$trainer_folder:$trainer_folder}
mounts+=${HETPLAN_MOUNTS:+,$HETPLAN_MOUNTS}
export mounts

# A step for each group of like nodes; when one fails the others are ended, but for a check, whose
# first host tells of all.
ends=1
[[ ${1:-} != --check ]] || ends=0
steps=()
"""
_AFTER = """\

trap 'kill -TERM "${steps[@]}" 2>/dev/null' TERM INT
status=0
open=("${steps[@]}")
while ((${#open[@]} > 0)); do
  running=" $(jobs -rp | tr '\\n' ' ')"
  left=()
  for step in "${open[@]}"; do
    if [[ $running == *" $step "* ]]; then
      left+=("$step")
      continue
    fi
    wait "$step"
    code=$?
    if ((code != 0 && status == 0)); then
      status=$code
      ((ends == 0)) || kill -TERM "${steps[@]}" 2>/dev/null
    fi
  done
  open=(${left[@]+"${left[@]}"})
  if ((${#open[@]} > 0)); then
    sleep 1 &
    wait "$!"
  fi
done
printf '%s\\n' "$status" > "$folder/logs/$domain.status"
exit "$status"
"""


def _directives(domain: LaunchDomain, hosts: Sequence[Host]) -> Iterator[str]:
    first = hosts[0]
    yield f"--job-name=hetplan-{domain.name}"
    yield f"--nodes={len(hosts)}"
    yield f"--nodelist={hostlist([host.name for host in hosts])}"
    yield "--ntasks-per-node=1"
    if first.device_kind != CPU_KIND:
        kind = domain.of_kind(first.device_kind).resource
        yield f"--gpus-per-node={f'{kind}:' if kind else ''}{first.devices_per_node}"
    yield "--exclusive"
    yield "--mem=0"
    if domain.partition:
        yield f"--partition={domain.partition}"
    if domain.account:
        yield f"--account={domain.account}"
    if domain.time_limit_seconds is not None:
        yield f"--time={slurm_time(domain.time_limit_seconds)}"
    # Started again alone, it would wait at the barrier for hosts that have ended.
    yield "--no-requeue"
    yield f"--output=slurm-{domain.name}-%j.out"


def _step(domain: LaunchDomain, hosts: Sequence[Host], number: int, count: int) -> str:
    image = domain.image_of(hosts[0].device_kind)
    lines = [
        "srun",
        *([f"--het-group={number}"] if count > 1 else []),
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        '--kill-on-bad-exit="$ends"',
        "--label",
        *([f"--container-image={word(pyxis_image(image))}"] if image else []),
        *(['--container-mounts="$mounts"'] if image else []),
        'bash "$folder/start-here.sh" "$@" &',
    ]
    return " \\\n  ".join(lines) + '\nsteps+=("$!")\n'


def slurm_time(seconds: float) -> str:
    """A time limit as days-hours:minutes:seconds, whole minutes at least."""
    whole = max(_MINUTE, round(seconds))
    days, rest = divmod(whole, _DAY)
    hours, rest = divmod(rest, _HOUR)
    minutes, left = divmod(rest, _MINUTE)
    return f"{days}-{hours:02d}:{minutes:02d}:{left:02d}"


def pyxis_image(image: str) -> str:
    """An image as pyxis writes it: `registry.example.org#train:1`; files as they are."""
    first, slash, rest = image.partition("/")
    registry = slash and first and ("." in first or ":" in first or first == "localhost")
    return f"{first}#{rest}" if registry and "#" not in image else image


def hostlist(names: Sequence[str]) -> str:
    """Names as Slurm writes many: `node[001-003,007],other`, in their order of appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name in names:
        found = _LAST_NUMBER.fullmatch(name)
        if found is None:
            groups[(name, 0)] = []
        else:
            before, digits = found.groups()
            groups.setdefault((before, len(digits)), []).append(int(digits))
    return ",".join(_written(*group, numbers) for group, numbers in groups.items())


def _written(before: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return before
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return f"{before}{numbers[0]:0{width}d}"
    parts = (
        f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        for first, last in runs
    )
    return f"{before}[{','.join(parts)}]"
