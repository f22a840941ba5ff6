"""launch.sbatch: a job of Slurm that runs launch.sh once on every node.

launch.sh finds its ranks by the node's name: Slurm sorts the nodes of a job, so its task numbers
say nothing about ranks. Nodes with unlike devices are components of one heterogeneous job, each
with its own step; the first step that fails ends the batch script, and Slurm ends the others.

Options: sbatch(1) and srun(1) of Slurm. `--exclusive` gives a job all devices of its nodes but only
the memory that it asks for, so `--mem=0`; `--cpu-bind=none` because a step of one task per node may
otherwise be bound to one core. `--container-image` is pyxis' (github.com/NVIDIA/pyxis), whose
images are written `REGISTRY#NAME` (enroot, doc/cmd/import.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.launch_domains import Scheduler
from hetplan.errors import InputError
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.quoting import comment, folder_word, hostlist, word
from hetplan.schedulers.rank_layout import Host, RankLayout, uniform_groups, used_devices
from hetplan.schedulers.torchrun import LAUNCH_FILE
from hetplan.schedulers.torchrun import launch_files as torchrun_files

SBATCH_FILE = "launch.sbatch"
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


def launch_files(
    ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> tuple[EmittedFile, ...]:
    """launch.sh and the job that runs it; an InputError where no host is in a Slurm domain."""
    text = sbatch_text(ranks, launch, options)
    return (
        *torchrun_files(ranks, launch, options),
        EmittedFile(path=SBATCH_FILE, text=text, executable=True),
    )


def start_lines(ranks: RankLayout, launch: TrainerLaunch) -> list[str]:
    """How the job is submitted."""
    others = len(ranks.hosts) - len(_hosts(ranks))
    lines = [
        f"    sbatch {SBATCH_FILE}",
        "",
        "from this folder, which every node must see under one path. Every node writes "
        "`log-NODE.txt`; `scancel` ends the job.",
    ]
    if others:
        lines.append(
            f"The other {others} hosts are in no Slurm domain: run `bash {LAUNCH_FILE}` there, or "
            "emit once more for their scheduler. All meet at the rendezvous."
        )
    return lines


def _hosts(ranks: RankLayout) -> list[Host]:
    return [host for host in ranks.hosts if host.domain.scheduler is Scheduler.SLURM]


def sbatch_text(ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions) -> str:
    """The job script of all hosts in Slurm domains."""
    hosts = _hosts(ranks)
    if not hosts:
        raise InputError(
            "--scheduler slurm: no host of the plan is in a launch domain with scheduler: slurm; "
            "name the domain in the cluster file, or emit for torchrun"
        )
    groups = [
        group
        for domain in dict.fromkeys(host.domain for host in hosts)
        for group in uniform_groups(
            [host for host in hosts if host.domain == domain], used_devices(ranks)
        )
    ]
    directives: list[str] = []
    for number, group in enumerate(groups):
        directives += ["#SBATCH hetjob\n"] if number else []
        directives += [f"#SBATCH {each}\n" for each in _directives(group)]
    mounted = (
        folder_word(options.trainer_folder) if options.trainer_folder else "${TRAINER_FOLDER:-}"
    )
    return "".join(
        (
            "#!/usr/bin/env bash\n",
            *directives,
            f"# A job of {comment(launch.title)}; submit it in its folder.\n",
            "set -euo pipefail\n",
            "folder=${HETPLAN_FOLDER:-$SLURM_SUBMIT_DIR} # Slurm runs a copy of this script\n",
            f"trainer_folder={mounted}\n",
            "mounts=$folder:$folder${trainer_folder:+,$trainer_folder:$trainer_folder}\n",
            "mounts+=${HETPLAN_MOUNTS:+,$HETPLAN_MOUNTS}\n",
            *(_step(group, number, len(groups)) for number, group in enumerate(groups)),
            f"for ((left = {len(groups)}; left > 0; left--)); do wait -n; done\n",
        )
    )


def _directives(hosts: Sequence[Host]) -> Iterator[str]:
    first = hosts[0]
    domain = first.domain
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
    # Started again alone, it would wait for hosts that have ended.
    yield "--no-requeue"
    yield f"--output=slurm-{domain.name}-%j.out"


def _step(hosts: Sequence[Host], number: int, count: int) -> str:
    image = hosts[0].domain.image_of(hosts[0].device_kind)
    options = [
        *([f"--het-group={number}"] if count > 1 else []),
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    lines = [" ".join(["srun", *options]), '--output="$folder/log-%N.txt"']
    if image:
        lines.append(f'--container-image={word(pyxis_image(image))} --container-mounts="$mounts"')
    return " \\\n  ".join([*lines, f'bash "$folder/{LAUNCH_FILE}" &\n'])


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
