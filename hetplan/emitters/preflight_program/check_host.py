# ruff: noqa: UP006, UP035, UP045, I001
"""Is this host ready for its part of a plan? What can be said without another host.

A part of check.py. Python 3.6 and its standard library are enough; torch is asked for in a process
of its own, with the interpreter that will train. Every check gives findings:

    {"check": what, "status": ok | note | fail, "found": text, "mend": text}

`note`: the plan may run, but somebody should look. Facts are what must be equal on all hosts.
"""

import os
import re
import resource
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

if __package__:
    from .check_devices import MIB, Finding, json_of, check_devices, finding
    from .check_devices import listed_devices, run_tool, size
else:
    from check_devices import MIB, Finding, json_of, check_devices, finding  # type: ignore
    from check_devices import listed_devices, run_tool, size  # type: ignore

TORCH_SECONDS = 300
"""The first import on a shared file system takes minutes."""
SHARED_MEMORY_BYTES = 1024 * MIB
"""NCCL and data loaders share memory in /dev/shm; containers have 64 MiB unless told otherwise
(NCCL user guide, Troubleshooting, Sharing Data: --shm-size=1g)."""
OPEN_FILES = 4096
"""Sockets of many ranks, and data files (a choice; the system's default is 1024)."""

_TORCH = """
import json, sys
import torch
nccl = ""
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    pass
print(json.dumps({"python": sys.version.split()[0], "torch": torch.__version__,
                  "hip": torch.version.hip or "", "cuda": torch.version.cuda or "", "nccl": nccl}))
"""


def check_versions(sheet: Dict[str, Any], host: Dict[str, Any]) -> Tuple[List[Finding], Any]:
    """(findings, facts): Python, torch and the trainer's checkout."""
    facts: Dict[str, str] = {}
    found: List[Finding] = []
    if not host["container"]:
        # The interpreter of start-here.sh, which need not be the one that runs this program.
        python = os.environ.get("HETPLAN_PYTHON") or sheet["python"]
        text, why = run_tool([python, "-c", _TORCH], TORCH_SECONDS)
        told = json_of(text or "")
        facts.update({key: str(value) for key, value in told.items() if value})
        if told:
            words = "Python {}, torch {}".format(facts.get("python"), facts.get("torch"))
            words += f" by {python}"
            found.append(finding("versions", "ok", words))
        else:
            status = "fail" if sheet["needs_torch"] else "note"
            mend = "install torch for it, or name another: HETPLAN_PYTHON, or emit with --python"
            words = "{}: {}".format(python, why or "torch told nothing")
            found.append(finding("versions", status, words, mend))
    return found + check_trainer(sheet, host, facts), facts


def check_trainer(sheet: Dict[str, Any], host: Dict[str, Any], facts: Any) -> List[Finding]:
    """The trainer's folder, its program and its commit, where the program lies in a checkout."""
    if not sheet["program"] or host["container"]:
        return []
    folder = sheet["trainer_folder"] or os.environ.get("TRAINER_FOLDER", "")
    if not folder:
        mend = "set TRAINER_FOLDER, or emit again with --trainer-folder"
        return [finding("trainer", "fail", "no trainer folder is named", mend)]
    path = os.path.join(folder, sheet["program"])
    if not os.path.isfile(path):
        mend = "put the trainer's checkout there on every host"
        return [finding("trainer", "fail", f"{path} is not there", mend)]
    commit, _ = run_tool(["git", "-C", folder, "rev-parse", "HEAD"])
    facts["trainer"] = commit.strip() if commit else "no git commit"
    return [finding("trainer", "ok", "{}, {}".format(folder, facts["trainer"][:12]))]


# ---- paths


def check_paths(sheet: Dict[str, Any], host: Dict[str, Any]) -> List[Finding]:
    """Data where it is read, the folders of checkpoints, and room for one."""
    found = []
    if host["needs_data"]:
        for path in sheet["data"]:
            # Megatron-LM takes weights between its data prefixes.
            if re.match(r"\d*\.?\d+$", path):
                continue
            if os.path.exists(path) or os.path.exists(path + ".idx"):
                found.append(finding("data", "ok", path))
            else:
                mend = "copy the data there: this host's ranks read it"
                found.append(finding("data", "fail", f"{path} is not there", mend))
    if sheet["load"]:
        there = os.path.exists(sheet["load"])
        mend = "" if there else "copy the checkpoint there, or mount its file system"
        status = "ok" if there else "fail"
        text = sheet["load"] + ("" if there else " is not there")
        found.append(finding("checkpoint to load", status, text, mend))
    if sheet["save"]:
        found.append(check_folder(sheet["save"], sheet["checkpoint_bytes"]))
    return found


def check_folder(folder: str, needed: float) -> Finding:
    """Whether a checkpoint can be written there."""
    name = "checkpoint folder"
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return finding(name, "fail", f"{there} is not a folder", "name another --save")
    if there != os.path.abspath(folder) and os.path.dirname(os.path.abspath(folder)) != there:
        text = f"{folder} is not there, nor is the folder above it"
        return finding(name, "fail", text, "make it, or mount its file system")
    if not os.access(there, os.W_OK | os.X_OK):
        return finding(name, "fail", f"{there} cannot be written to", "change its rights")
    room = os.statvfs(there)
    free = float(room.f_bavail) * room.f_frsize
    if free < needed:
        text = f"{there} has {size(free)} free; a checkpoint is {size(needed)}"
        return finding(name, "fail", text, "make room, or name another --save")
    return finding(name, "ok", f"{there}, {size(free)} free for {size(needed)}")


# ---- the host itself


def check_limits(
    host: Dict[str, Any],
    limits: Optional[Dict[str, float]] = None,
    fabric: str = "/sys/class/infiniband",
    shared_memory: str = "/dev/shm",
) -> List[Finding]:
    """Shared memory, open files, locked memory, and the fabric's devices."""
    limits = limits if limits is not None else own_limits()
    found = []
    if limits["nofile"] < OPEN_FILES:
        text = "{:.0f} open files are allowed".format(limits["nofile"])
        found.append(finding("limits", "note", text, f"ulimit -n {OPEN_FILES} or more"))
    devices = sorted(os.listdir(fabric)) if os.path.isdir(fabric) else []
    lost = [name for name in host["fabric_devices"] if name.split(":")[0] not in devices]
    if lost:
        text = "{}: no such RDMA device; here are {}".format(
            ", ".join(lost),
            ", ".join(devices) or "none",
        )
        found.append(finding("fabric", "fail", text, "correct fabric_devices in the cluster file"))
    if (devices or host["fabric_devices"]) and limits["memlock"] != float("inf"):
        text = "{} of memory may be locked; RDMA locks what it sends".format(
            size(limits["memlock"])
        )
        found.append(finding("limits", "note", text, "ulimit -l unlimited"))
    if os.path.isdir(shared_memory) and len(host["devices"]) > 1 and not host["container"]:
        room = os.statvfs(shared_memory)
        total = float(room.f_blocks) * room.f_frsize
        if total < SHARED_MEMORY_BYTES:
            text = f"{shared_memory} is {size(total)}; ranks of a host share memory there"
            mend = f"mount -o remount,size=8G {shared_memory}; docker --shm-size=8g"
            found.append(finding("limits", "note", text, mend))
    return found or [finding("limits", "ok", "open files, locked and shared memory")]


def own_limits() -> Dict[str, float]:
    """Soft limits of this process."""
    found = {}
    for name in ("nofile", "memlock"):
        soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))[0]
        found[name] = float("inf") if soft == resource.RLIM_INFINITY else float(soft)
    return found


def check_names(
    sheet: Dict[str, Any], host: Dict[str, Any], interfaces: str = "/sys/class/net"
) -> List[Finding]:
    """The names by which hosts reach each other mean something here, and the interface is up."""
    found = []
    first = sheet["hosts"][0]
    for each in [first] + ([host] if host["name"] != first["name"] else []):
        try:
            socket.getaddrinfo(each["address"], None)
        except (OSError, UnicodeError):
            text = "{} has no address here".format(each["address"])
            mend = "add it to DNS or /etc/hosts, or give addresses in the cluster file"
            found.append(finding("names", "fail", text, mend))
    state = os.path.join(interfaces, host["interface"], "operstate") if host["interface"] else ""
    if state and not os.path.exists(state):
        have = ", ".join(sorted(os.listdir(interfaces))) if os.path.isdir(interfaces) else "none"
        text = "no interface {}; here are {}".format(host["interface"], have)
        found.append(finding("names", "fail", text, "correct interface in the cluster file"))
    elif state:
        with open(state) as stream:
            word = stream.read().strip()
        # A loopback, a bridge or a tunnel says `unknown`.
        if word not in ("up", "unknown"):
            text = "interface {} is {}".format(host["interface"], word)
            found.append(finding("names", "fail", text, "bring it up, or name another"))
    return found or [finding("names", "ok", "addresses resolve")]


def check_host(sheet: Dict[str, Any], host: Dict[str, Any]) -> Dict[str, Any]:
    """Everything about this host alone: findings and facts."""
    devices, why = (None, "") if host["device_kind"] == "cpu" else listed_devices(host["vendor"])
    versions, facts = check_versions(sheet, host)
    parts: List[Callable[[], List[Finding]]] = [
        lambda: check_names(sheet, host),
        lambda: check_devices(host, devices, why),
        lambda: versions,
        lambda: check_paths(sheet, host),
        lambda: check_limits(host),
    ]
    return {
        "host": host["name"],
        "findings": [each for part in parts for each in part()],
        "facts": facts,
        "python_here": sys.version.split()[0],
        "checked_at": time.time(),
    }
