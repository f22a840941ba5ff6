# ruff: noqa: B905, UP006, UP035, UP045
"""What was found on all hosts together, and how it is shown.

A part of check.py.
"""

from typing import Any, Dict, List, Optional

if __package__:
    from .check_devices import finding
else:
    from check_devices import finding  # type: ignore

SCHEMA = "hetplan.checked/1"
EQUAL = (
    # What differs between hosts, whether that stops a run, what to do.
    ("torch", "fail", "install one version on all hosts"),
    ("trainer", "fail", "check out one commit on all hosts"),
    ("python", "note", "use one version on all hosts"),
    ("nccl", "fail", "use one version wherever devices of one vendor talk to each other"),
)
_FINDING = ["check", "found", "mend", "status"]
"""Keys of a finding (check_devices.py), in order."""


def is_report(value: Any, name: str) -> bool:
    """Whether a message is what the host says of itself."""
    found = value.get("findings") if isinstance(value, dict) and value.get("host") == name else None
    return (
        isinstance(found, list)
        and isinstance(value.get("facts"), dict)
        and all(isinstance(each, dict) and sorted(each) == _FINDING for each in found)
        and all(each["status"] in ("ok", "note", "fail") for each in found)
    )


def combined(
    sheet: Dict[str, Any],
    reports: List[Any],
    pairs: List[Dict[str, Any]],
    missing: List[str],
    shared: Optional[List[Dict[str, str]]] = None,
) -> Dict[str, Any]:
    """One report of all that was found."""
    findings = [
        dict(each, host=report["host"]) for report in reports for each in report["findings"]
    ]
    findings += [dict(each, host="") for each in shared or []]
    mend = (
        "run check.py there at the same time; look whether it says that it cannot reach this host"
    )
    findings += [dict(finding("host", "fail", "did not come", mend), host=name) for name in missing]
    findings += unlike(sheet, reports)
    mend = "measure the link again and plan again, or mend the network"
    for pair in pairs:
        name = "{} to {}".format(pair["sender"], pair["receiver"])
        line = finding(
            "network", pair["status"], pair["found"], mend if pair["status"] != "ok" else ""
        )
        findings.append(dict(line, host=name))
    return {
        "schema": SCHEMA,
        "hosts": [report["host"] for report in reports],
        "missing": missing,
        "findings": findings,
        "facts": {report["host"]: report["facts"] for report in reports},
        "pairs": pairs,
        "all_pairs": sheet["all_pairs"],
        "failed": any(each["status"] == "fail" for each in findings),
    }


def unlike(sheet: Dict[str, Any], reports: List[Any]) -> List[Dict[str, str]]:
    """Facts that are not equal on all hosts; those of one vendor's library, on all hosts of it."""
    vendors = {host["name"]: host["vendor"] for host in sheet["hosts"]}
    found = []
    for name, status, mend in EQUAL:
        groups: Dict[str, Dict[str, List[str]]] = {}
        for report in reports:
            value = report["facts"].get(name)
            if value:
                # torch 2.6.0+cu124 and 2.6.0+rocm6.2 are one version.
                value = value.split("+")[0] if name == "torch" else value
                vendor = vendors[report["host"]] if name == "nccl" else ""
                groups.setdefault(vendor, {}).setdefault(value, []).append(report["host"])
        for values in groups.values():
            if len(values) > 1:
                parts = (f"{value} on {some(hosts)}" for value, hosts in sorted(values.items()))
                line = finding("equal " + name, status, "; ".join(parts), mend)
                found.append(dict(line, host=""))
    return found


def some(names: List[str]) -> str:
    """The first names and how many more."""
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")


# ---- what people read


def figures(measured: Dict[str, Any]) -> str:
    """Round trip and rate."""
    if "round_trip_seconds" not in measured or "bandwidth_bytes_per_second" not in measured:
        return "-"
    return "{:.3g} ms, {}/s".format(
        1e3 * measured["round_trip_seconds"], speed(measured["bandwidth_bytes_per_second"])
    )


def speed(rate: float) -> str:
    """Bytes per second for people, decimal as networks count."""
    for unit in ("B", "kB", "MB"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} GB"


def part_of(report: Dict[str, Any], host: str) -> Dict[str, Any]:
    """What of a report is about one host."""
    findings = [each for each in report["findings"] if each["host"] == host]
    return dict(report, hosts=[host], missing=[], findings=findings, pairs=[])


def report_text(report: Dict[str, Any], checked: str = "") -> str:
    """A table of hosts, one of links, and what to mend.

    `checked`: how many hosts were looked at, where it is not all of them.
    """
    words = {"ok": "ok", "note": "look", "fail": "MEND"}
    order = ["ok", "note", "fail"]
    rows = []
    for name in report["hosts"] + report["missing"]:
        own = [each for each in report["findings"] if each["host"] == name]
        worst = max((order.index(each["status"]) for each in own), default=0)
        lines = ["{} {}".format(each["check"], words[each["status"]]) for each in own]
        rows.append((name, words[order[worst]], ", ".join(dict.fromkeys(lines))))
    lines = table(("host", "", "checks"), rows)
    if report["pairs"]:
        lines += ["", "links: %d of the %d that the plan sends over, one after the other"]
        lines[-1] %= (len(report["pairs"]), report["all_pairs"])
        lines += table(
            ("from", "to", "planned", "measured", ""),
            [
                (
                    pair["sender"],
                    pair["receiver"],
                    figures(pair),
                    figures(pair["measured"]),
                    words[pair["status"]],
                )
                for pair in report["pairs"]
            ],
        )
    problems = [each for each in report["findings"] if each["status"] != "ok"]
    if problems:
        lines.append("")
    for each in sorted(problems, key=lambda each: -order.index(each["status"])):
        where = each["host"] + ": " if each["host"] else ""
        lines.append(
            "{} {}{}: {}".format(words[each["status"]], where, each["check"], each["found"])
        )
        if each["mend"]:
            lines.append("     -> {}".format(each["mend"]))
    verdict = "something must be mended" if report["failed"] else "ready"
    if checked:
        verdict = checked + " checked" + (", " + verdict if report["failed"] else "")
    lines += ["", verdict]
    return "\n".join(lines)


def table(heads: Any, rows: List[Any]) -> List[str]:
    """Columns as wide as their widest cell, but the last."""
    every = [heads, *rows]
    widths = [max(len(row[at]) for row in every) for at in range(len(heads) - 1)] + [0]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in every
    ]
