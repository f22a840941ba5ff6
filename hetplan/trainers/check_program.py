#!/usr/bin/env python3
"""Checks this host before its part of the job starts. Run it on every host at one time.

    python3 check.py [--host NAME] [--wait SECONDS] [--alone]

Looks at names, interfaces, devices and their free memory, versions, paths and limits, and whether
every host reaches the rendezvous port of the first one (--alone leaves that out). Prints one line
per thing that was looked at; equal lines of all hosts are merged by `dshbak -c`.

Exit status: 0 ready, 1 mend something, 2 called wrongly. Python 3.8 is enough for it.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import hmac
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from typing import Any

GIB = 1024.0**3
TORCH_SECONDS = 300  # the first import on a shared file system takes minutes
OPEN_FILES = 4096

# torch's name for the devices of vendors that are not called cuda, and the package that adds it.
OTHER_DEVICES = {
    "huawei": ("npu", "torch_npu"),
    "cambricon": ("mlu", "torch_mlu"),
    "moore-threads": ("musa", "torch_musa"),
    "intel": ("xpu", "torch"),
}
TORCH = """
import importlib, json, sys
name, package = sys.argv[1:3]
import torch
importlib.import_module(package)
told = {"python": sys.version.split()[0], "torch": torch.__version__, "devices": []}
if name == "cuda" and torch.cuda.is_available():
    told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
api = getattr(torch, name)
for at in range(api.device_count()):
    free, total = api.mem_get_info(at)
    told["devices"].append([api.get_device_name(at), free, total])
print(json.dumps(told))
"""

failures: list[str] = []


def ok(what: str, found: str, word: str = "ok") -> None:
    """Something is as it should be; `note`: somebody should look."""
    print(f"{word:<5} {what}: {found}", flush=True)


def fail(what: str, found: str, mend: str) -> None:
    """Something must be mended before the start."""
    failures.append(what)
    ok(what, f"{found}; {mend}", "FAIL")


def this_host(hosts: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The host of this name, or with the names by which the machine calls itself."""
    name = name or os.environ.get("HETPLAN_HOST") or os.environ.get("SLURMD_NODENAME") or ""
    names = [name] if name else [socket.gethostname(), socket.getfqdn()]
    for host in hosts:
        if host["name"] in names or host["address"] in names:
            return host
    for host in hosts:
        short = host["name"].split(".")[0]
        if not short.isdigit() and short in [each.split(".")[0] for each in names]:
            return host
    known = ", ".join(host["name"] for host in hosts[:20])
    print(f"none of the plan's hosts is called {' or '.join(names)}: name it with "
          f"--host; there are {known}", file=sys.stderr)  # fmt: skip
    sys.exit(2)


def check_network(host: dict[str, Any], first: dict[str, Any]) -> None:
    """Names have addresses, the interface is up, RDMA devices are there."""
    for address in sorted({first["address"], host["address"]}):
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError):
            fail("name", f"{address} has no address here", "add it to DNS or /etc/hosts")
    interface, folder = host["interface"], "/sys/class/net"
    if interface:
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        state = "not there"
        if interface in there:
            with open(os.path.join(folder, interface, "operstate")) as stream:
                state = stream.read().strip()
        # A loopback, a bridge or a tunnel says `unknown`.
        if state in ("up", "unknown"):
            ok("interface", f"{interface} is {state}")
        else:
            mend = f"bring it up, or name another in the cluster file: {', '.join(there)}"
            fail("interface", f"{interface} is {state}", mend)
    folder = "/sys/class/infiniband"
    there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    lost = [name for name in host["fabric_devices"] if name.split(":")[0] not in there]
    if lost:
        mend = "correct `fabric_devices` in the cluster file"
        fail("fabric", f"no {', '.join(lost)}; here are {', '.join(there) or 'none'}", mend)
    elif host["fabric_devices"]:
        ok("fabric", ", ".join(host["fabric_devices"]))


def check_torch(host: dict[str, Any], python: str) -> None:
    """Versions, and the plan's devices with enough free memory."""
    python = os.environ.get("HETPLAN_PYTHON") or python
    device, package = OTHER_DEVICES.get(host["vendor"], ("cuda", "torch"))
    try:
        done = subprocess.run(
            [python, "-c", TORCH, device, package],
            capture_output=True, timeout=TORCH_SECONDS, check=True,
        )  # fmt: skip
        told = json.loads(done.stdout.decode().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", None) or b"").decode(errors="replace").split("\n")
        words = [word for word in words if word.strip()] or [str(error)]
        return fail("torch", f"{python}: {words[-1]}", "install it, or set HETPLAN_PYTHON")
    ok("versions", ", ".join(f"{key} {told[key]}" for key in told if key != "devices"))
    devices = told["devices"]
    if host["device_kind"] == "cpu":
        return
    if max(host["devices"]) >= len(devices):
        have = f"{len(devices)} devices are seen, the plan uses number {max(host['devices'])}"
        return fail("devices", have, "free them, or plan with fewer")
    needed = host["memory_bytes"]
    for at in host["devices"]:
        name, free, total = devices[at]
        room = f"device {at} ({name}) has {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < needed:
            mend = "end what runs there" if total >= needed else "plan for this memory"
            fail("devices", f"{room}; the plan needs {needed / GIB:.1f}", mend)
    kinds = sorted({name for name, _, _ in devices})
    ok("devices", f"{len(devices)} of {', '.join(kinds)} (plan: {host['device_kind']})")


def check_paths(host: dict[str, Any], plan: dict[str, Any]) -> None:
    """The trainer, the data where it is read, and room for a checkpoint."""
    folder = plan["trainer_folder"] or os.environ.get("TRAINER_FOLDER", "$TRAINER_FOLDER")
    wanted = [("trainer", os.path.join(folder, plan["program"]))] if plan["program"] else []
    wanted += [("checkpoint", plan["load"])] if plan["load"] else []
    if host["reads_data"]:
        # Megatron-LM takes weights between its data prefixes.
        wanted += [("data", each) for each in plan["data"] if not re.match(r"\d*\.?\d+$", each)]
    for what, path in wanted:
        if os.path.exists(path) or os.path.exists(path + ".idx"):
            ok(what, path)
        else:
            fail(what, f"{path} is not there", "copy it, or mount its file system")
    if plan["save"]:
        there = os.path.abspath(plan["save"])
        while not os.path.exists(there):
            there = os.path.dirname(there)
        room = os.statvfs(there)
        free, needed = room.f_bavail * room.f_frsize, plan["checkpoint_bytes"]
        text = f"{there} has {free / GIB:.0f} GiB free, a checkpoint is {needed / GIB:.0f} GiB"
        if free < needed or not os.access(there, os.W_OK):
            fail("save", text, "make room and let it be written to, or name another --save")
        else:
            ok("save", text)


def check_limits(host: dict[str, Any]) -> None:
    """Open files, locked memory, shared memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < OPEN_FILES:  # -1: no limit
        ok("limits", f"{files} open files are allowed; ulimit -n {OPEN_FILES}", "note")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if host["fabric_devices"] and locked != resource.RLIM_INFINITY:
        ok("limits", f"{locked} bytes may be locked, RDMA locks what it sends", "note")
    room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    # NCCL and data loaders share memory there; containers have 64 MiB unless told otherwise.
    if room and room.f_blocks * room.f_frsize < GIB:
        ok("limits", "/dev/shm is below 1 GiB; mount -o remount,size=8G /dev/shm", "note")


def listen(address: str, port: int) -> socket.socket:
    """Listen on the rendezvous address alone, where other hosts can reach this one under it."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    here = str(place[0])
    if here.startswith("127.") or here == "::1":
        why = f"is {here} here (/etc/hosts)"
    else:
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            why = "is none of this host's own addresses"
    if here != address:
        ok("port", f"{address} {why}: listening on all interfaces", "note")
        place = ("", port)
    return socket.create_server(place[:2], family=family)


def proof(key: bytes, nonce: str, word: str) -> str:
    """What only a host with this very file can say."""
    return hmac.new(key, f"{nonce} {word}".encode(), "sha256").hexdigest()


def guest_name(guest: socket.socket, key: bytes) -> str:
    """The name that a host says and proves; empty where it cannot."""
    guest.settimeout(2)
    nonce = os.urandom(16).hex()
    with guest.makefile("rwb") as stream:
        stream.write(f"{nonce}\n".encode())
        stream.flush()
        name, _, given = stream.readline(512).decode(errors="replace").strip().partition(" ")
        if not hmac.compare_digest(given.encode(), proof(key, nonce, name).encode()):
            return ""
        stream.write(f"{proof(key, nonce, 'seen')}\n".encode())
    return name


def receive_hosts(address: tuple[str, int], names: set[str], key: bytes, seconds: float) -> None:
    """On the first host: listen on the rendezvous port until every other host has said its name."""
    port, turned_away = address[1], 0
    try:
        server = listen(*address)
    except OSError as error:
        return fail("port", f"{port}: {error.strerror}", "end what uses it")
    end = time.monotonic() + seconds
    with server:
        while names and time.monotonic() < end:
            server.settimeout(max(0.1, end - time.monotonic()))
            try:
                guest, _ = server.accept()
            except OSError:
                continue
            try:
                with guest:
                    name = guest_name(guest, key)
            except OSError:
                name = ""
            turned_away += not name
            names.discard(name)
    if turned_away:
        ok("port", f"{turned_away} who called did not know this folder", "note")
    if names:
        missing = ", ".join(sorted(names)[:20])
        fail("port", f"{missing} did not reach port {port}", "open it, or check there")
    else:
        ok("port", f"every host reaches port {port}")


def reach_first(address: tuple[str, int], name: str, key: bytes, seconds: float) -> None:
    """On the other hosts: tell the first one the name."""
    end = time.monotonic() + seconds
    while True:
        try:
            with (
                socket.create_connection(address, timeout=5) as guest,
                guest.makefile("rwb") as stream,
            ):
                nonce = stream.readline(512).decode(errors="replace").strip()
                stream.write(f"{name} {proof(key, nonce, name)}\n".encode())
                stream.flush()
                if stream.readline(512).decode(errors="replace").strip() == proof(
                    key, nonce, "seen"
                ):
                    return ok("port", f"{address[0]}:{address[1]} is reached")
            found = "something answers that does not know this folder"
        except OSError as error:
            found = str(error)
        if time.monotonic() > end:
            place = f"{address[0]}:{address[1]}"
            return fail("port", f"{place}: {found}", "run check.py of this folder there")
        time.sleep(1)


def main() -> int:
    """Run all checks; the exit status."""
    parser = argparse.ArgumentParser(description="Checks a host before the job is started.")
    parser.add_argument("--host", default="", help="name of this host in the plan")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for other hosts")
    parser.add_argument("--alone", action="store_true", help="this host only")
    asked = parser.parse_args()
    with open(os.path.abspath(__file__), encoding="utf-8") as stream:
        text = stream.read()
    plan = json.loads(text.rpartition("\n# ")[2])["checks"]
    first, host = plan["hosts"][0], this_host(plan["hosts"], asked.host)
    check_network(host, first)
    if not host["container"]:
        check_torch(host, plan["python"])
        check_paths(host, plan)
    check_limits(host)
    if len(plan["hosts"]) > 1 and not asked.alone:
        address = (first["address"], plan["port"])
        key = hashlib.sha256(text.encode()).digest()  # every host has this file, nobody else
        if host is first:
            names = {each["name"] for each in plan["hosts"][1:]}
            receive_hosts(address, names, key, asked.wait)
        else:
            reach_first(address, host["name"], key, asked.wait)
    print("correct what FAIL names" if failures else "ready")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
