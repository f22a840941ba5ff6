"""What starts a job on all its hosts, whatever their schedulers, and ends all when one fails?

`start-all.sh` is made of lists of the plan's launch domains, written here, and a body that is the
same for every plan (`start_all.sh`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hetplan.cluster.launch_domains import Scheduler
from hetplan.emitters.quoting import comment, word
from hetplan.emitters.schedulers.kubernetes import job_label, pod_count
from hetplan.emitters.schedulers.start import FIND_FOLDER, SCRIPT_HEAD, body
from hetplan.emitters.schedulers.tables import Tables
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import TrainerLaunch

START_ALL_FILE = "start-all.sh"


def start_all_text(sheet: LaunchSheet, launch: TrainerLaunch, tables: Tables) -> str:
    """The script that starts every host."""
    domains = sheet.domains
    plain, slurm, pods = (
        [each for each in domains if each.scheduler is scheduler]
        for scheduler in (Scheduler.HOSTS, Scheduler.SLURM, Scheduler.KUBERNETES)
    )
    return "".join(
        (
            SCRIPT_HEAD,
            f"# Starts all hosts of a job of {comment(launch.title)}: see start-all.sh --help.\n",
            "set -uo pipefail\n",
            FIND_FOLDER,
            "\n",
            _array("domains", (each.name for each in domains)),
            _array("plain_domains", (each.name for each in plain)),
            _array("plain_users", (each.ssh_user for each in plain)),
            _array("plain_ports", (str(each.ssh_port) for each in plain)),
            _array("slurm_domains", (each.name for each in slurm)),
            _array("pod_domains", (each.name for each in pods)),
            _array("pod_namespaces", (each.namespace for each in pods)),
            _array("pod_jobs", (job_label(each, tables) for each in pods)),
            _array("pod_counts", (str(pod_count(sheet, each)) for each in pods)),
            "\n",
            body("children.sh"),
            body("start_all.sh"),
        )
    )


def _array(name: str, texts: Iterable[str]) -> str:
    return f"{name}=({' '.join(word(text) for text in texts)})\n"
