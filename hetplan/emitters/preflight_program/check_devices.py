# ruff: noqa: UP006, UP022, UP035, UP045
"""Which devices does this host have, and are the plan's free? Asked of the vendor's own tool.

A part of check.py. Parsers are `text -> devices`; text that one cannot read gives none. Forms of
the tools' output: nvidia-smi --help-query-gpu; rocm.docs.amd.com, rocm-smi and amd-smi;
hiascend.com, npu-smi info.
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Tuple

Finding = Dict[str, str]
Device = Dict[str, Any]
"""name, total_bytes, used_bytes; what a tool does not tell is missing."""

MIB = 2.0**20
TOOL_SECONDS = 60
# Rounding of tools and what the driver keeps for itself (nvidia-smi counts 80 GiB as 79.6).
MEMORY_SLACK = 0.02
BUSY_BYTES = 1024 * MIB
"""More in use than a driver takes: somebody's process (a choice)."""


def finding(check: str, status: str, found: str, mend: str = "") -> Finding:
    """One line of the report."""
    return {"check": check, "status": status, "found": found, "mend": mend}


def run_tool(arguments: List[str], seconds: float = TOOL_SECONDS) -> Tuple[Optional[str], str]:
    """(what a program printed, or None; why there is nothing)."""
    if shutil.which(arguments[0]) is None:
        return None, f"{arguments[0]} is not here"
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None, f"{arguments[0]} gave no answer in {seconds:.0f} s"
    except OSError as error:
        return None, f"{arguments[0]}: {error}"
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        words = (done.stderr.decode("utf-8", "replace") or text).strip().splitlines()
        why = words[-1] if words else "no message"
        return None, f"{arguments[0]} ended with {done.returncode}: {why}"
    return text, ""


def nvidia_devices(text: str) -> List[Device]:
    """Of `nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv,noheader,nounits`."""
    rows = (row for row in csv.reader(io.StringIO(text)) if len(row) == 3)
    return [
        dict(
            [
                ("name", name.strip()),
                *_bytes_of("total_bytes", total, MIB),
                *_bytes_of("used_bytes", used, MIB),
            ]
        )
        for name, total, used in rows
    ]


def rocm_devices(text: str) -> List[Device]:
    """Of `rocm-smi --showproductname --showmeminfo vram --json`."""
    cards = json_of(text)
    found = []
    for key in sorted(cards, key=lambda key: (len(key), key)):
        if not re.match(r"card\d+$", key) or not isinstance(cards[key], dict):
            continue
        card = {str(name).lower(): str(value) for name, value in cards[key].items()}
        names = ("card series", "card model", "device name", "card sku")
        named = [card[name] for name in names if card.get(name, "N/A") not in ("", "N/A")]
        found.append(
            dict(
                [
                    ("name", named[0] if named else ""),
                    *_bytes_of("total_bytes", card.get("vram total memory (b)", ""), 1.0),
                    *_bytes_of("used_bytes", card.get("vram total used memory (b)", ""), 1.0),
                ]
            )
        )
    return found


def amd_devices(static: str, metric: str) -> List[Device]:
    """Of `amd-smi static --asic --json` and `amd-smi metric --mem-usage --json`."""
    used = {entry.get("gpu"): entry.get("mem_usage", {}) for entry in _amd_entries(metric)}
    found = []
    for entry in _amd_entries(static):
        memory = used.get(entry.get("gpu"), {})
        found.append(
            dict(
                [
                    ("name", str(entry.get("asic", {}).get("market_name", ""))),
                    *_amd_bytes("total_bytes", memory.get("total_vram")),
                    *_amd_bytes("used_bytes", memory.get("used_vram")),
                ]
            )
        )
    return found


def npu_devices(text: str) -> List[Device]:
    """Of `npu-smi info`: two table rows per chip, the second ends with HBM used / total in MB."""
    found = []
    name = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        first = re.match(r"\d+\s+([A-Za-z0-9][\w.-]*)$", cells[0])
        if first and not re.search(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:", cells[1]):
            name = first.group(1)
        elif name and re.match(r"\d+", cells[0]):
            usages = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            used, total = max(usages, key=lambda pair: int(pair[1])) if usages else ("", "")
            full = name if name.lower().startswith("ascend") else "Ascend" + name
            found.append(
                dict(
                    [
                        ("name", full),
                        *_bytes_of("total_bytes", total, MIB),
                        *_bytes_of("used_bytes", used, MIB),
                    ]
                )
            )
    return found


def _bytes_of(key: str, text: str, unit: float) -> List[Tuple[str, Any]]:
    """The figure, or nothing where the tool says N/A."""
    try:
        return [(key, float(text) * unit)]
    except ValueError:
        return []


def _amd_bytes(key: str, value: Any) -> List[Tuple[str, Any]]:
    if not isinstance(value, dict):
        return []
    units = {"B": 1.0, "KB": 1024.0, "MB": MIB, "GB": 1024 * MIB}
    unit = units.get(str(value.get("unit")).upper())
    return _bytes_of(key, str(value.get("value")), unit) if unit else []


def _amd_entries(text: str) -> List[Dict[str, Any]]:
    """A list; newer versions put it under gpu_data."""
    start = min([at for at in (text.find("["), text.find("{")) if at >= 0] or [0])
    try:
        data = json.loads(text[start:])
    except ValueError:
        return []
    listed = data.get("gpu_data", []) if isinstance(data, dict) else data
    return [entry for entry in listed if isinstance(entry, dict)]


def json_of(text: str) -> Dict[str, Any]:
    """The object in a tool's output; empty where there is none."""
    # Some versions print warnings before the object.
    try:
        data = json.loads(text[text.index("{") :])
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def listed_devices(vendor: str) -> Tuple[Optional[List[Device]], str]:
    """(devices of this vendor, or None; why they are not known)."""
    if vendor == "nvidia":
        query = ["--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
        text, why = run_tool(["nvidia-smi", *query])
        return (None, why) if text is None else (nvidia_devices(text), "")
    if vendor == "amd":
        text, why = run_tool(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"])
        if text is not None and rocm_devices(text):
            return rocm_devices(text), ""
        static, other = run_tool(["amd-smi", "static", "--asic", "--json"])
        metric, _ = run_tool(["amd-smi", "metric", "--mem-usage", "--json"])
        if static is None:
            return None, "{}; {}".format(why or "rocm-smi lists no card", other)
        return amd_devices(static, metric or ""), ""
    if vendor == "huawei":
        text, why = run_tool(["npu-smi", "info"])
        return (None, why) if text is None else (npu_devices(text), "")
    return None, ""


def check_devices(host: Dict[str, Any], devices: Optional[List[Device]], why: str) -> List[Finding]:
    """Are the plan's devices here, of the right kind, and free?"""
    kind, wanted = host["device_kind"], host["devices"]
    if kind == "cpu":
        return _check_cores(host)
    if devices is None and not why:
        text = "{}: no tool is known that lists devices of {}".format(kind, host["vendor"])
        return [finding("devices", "note", text, "look for yourself")]
    if devices is None:
        mend = "install the driver, or correct the host's device kind in the cluster file"
        return [finding("devices", "fail", why, mend)]
    missing = [number for number in wanted if number >= len(devices)]
    if missing:
        text = f"{len(devices)} devices are here; the plan uses {numbers(wanted)}"
        return [finding("devices", "fail", text, "correct devices_per_node, or mend the node")]
    found = []
    for number in wanted:
        device = devices[number]
        if not same_kind(kind, device["name"]):
            text = "device {} is {}, the plan wants {}".format(number, device["name"], kind)
            found.append(finding("devices", "fail", text, "correct the cluster file, plan again"))
            continue
        found += _check_memory(number, device, host["memory_bytes"])
    return found or [finding("devices", "ok", f"{len(wanted)} x {kind}, free")]


def _check_memory(number: int, device: Device, needed: float) -> List[Finding]:
    total, used = device.get("total_bytes"), device.get("used_bytes")
    if total is None or used is None:
        text = f"device {number}: the driver does not say what is free"
        return [finding("devices", "note", text, "look for yourself")]
    text = f"device {number} has {size(used)} of {size(total)} in use"
    if total - used < needed * (1 - MEMORY_SLACK):
        text += f"; the plan needs {size(needed)} there"
        return [finding("devices", "fail", text, "end what uses it, or use another host")]
    if used > BUSY_BYTES:
        return [finding("devices", "note", text, "another process slows the plan: end it")]
    return []


def _check_cores(host: Dict[str, Any]) -> List[Finding]:
    """Ranks on CPU cores: one each, and memory for all."""
    ranks = len(host["devices"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = []
    if (cores or 1) < ranks:
        text = f"{cores or 1} cores for {ranks} ranks"
        found.append(finding("devices", "note", text, "ranks share cores and are slower"))
    free = _free_memory()
    if free is not None and free < ranks * host["memory_bytes"]:
        text = f"{size(free)} free; {ranks} ranks need {size(host['memory_bytes'])} each"
        found.append(finding("devices", "fail", text, "end what uses memory"))
    return found or [finding("devices", "ok", f"{ranks} ranks on {cores or 1} cores")]


def _free_memory() -> Optional[float]:
    try:
        with open("/proc/meminfo") as stream:
            text = stream.read()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return float(match.group(1)) * 1024 if match else None


def same_kind(kind: str, name: str) -> bool:
    """Whether a catalogue's name (`nvidia-a100-80gb-sxm`) and a driver's agree in the model.

    Vendors may stand in front of the driver's name or not.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    model = kind.lower().split("-")[1:2]
    return all(word in words or word in "".join(words) for word in model)


def size(count: float) -> str:
    """A number of bytes for people."""
    if count == float("inf"):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def numbers(values: List[int]) -> str:
    """0-3, 6 of [0, 1, 2, 3, 6]."""
    runs: List[List[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
