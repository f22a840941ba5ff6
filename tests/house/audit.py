"""`make audit`: known vulnerabilities of the versions in constraints.txt, secrets in the files.

pip-audit asks the vulnerability service of the package index, detect-secrets reads what git has.
Both are installed into an environment of their own. Without network what cannot be done is said,
and is no failure; exit code 1 where something was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv" / "audit"
TOOLS = ("pip-audit==2.10.1", "detect-secrets==1.5.0")
MOST_SECONDS = 900
# Digests of emitted texts, whose 64 hex digits look like keys; measured times and drawings.
NO_SECRETS = r"tests/freeze/record\.json|.*\.(csv|svg)"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A tool's run; it may take as long as a slow network and two busy cores need."""
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )


def vulnerability_lines(told: dict[str, Any]) -> tuple[int, list[str]]:
    """(number of packages that were looked up, a line for each that is vulnerable) of what
    pip-audit says as JSON.
    """
    found = [each for each in told["dependencies"] if "vulns" in each]
    lines = [
        f"{each['name']} {each['version']}: {one['id']}, mended in "
        f"{', '.join(one['fix_versions']) or 'no version'}"
        for each in found
        for one in each["vulns"]
    ]
    return len(found), lines


def vulnerabilities(tool: Path) -> Iterator[tuple[bool, str]]:
    """(is it bad, words): what is known of the versions that are installed."""
    words = ("-r", "constraints.txt", "--no-deps", "--disable-pip", "-f", "json")
    done = run(str(tool), *words, "--progress-spinner", "off")
    try:
        told = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield False, f"vulnerabilities: SKIPPED, pip-audit could not ask ({last[:100]})"
        return
    looked_up, lines = vulnerability_lines(told)
    every = len(told["dependencies"])
    if looked_up < every:
        words = f"SKIPPED for {every - looked_up} of {every} packages"
        yield False, f"vulnerabilities: {words}: the index in use does not know them"
    if looked_up:
        yield False, f"vulnerabilities: {len(lines)} in {looked_up} packages"
    for line in lines:
        yield True, f"  {line}"


def secrets(tool: Path) -> Iterator[tuple[bool, str]]:
    """(is it bad, words): what looks like a key or a password in the files of git."""
    done = run(str(tool), "scan", "--exclude-files", NO_SECRETS)
    if done.returncode:
        yield True, f"secrets: detect-secrets failed: {done.stderr.strip()[-200:]}"
        return
    found = json.loads(done.stdout)["results"]
    yield False, f"secrets: {sum(map(len, found.values()))} found"
    for each in (one for file in found.values() for one in file):
        yield True, f"  {each['filename']}:{each['line_number']}: {each['type']}"


def main() -> int:
    """Say what was found; the exit code."""
    if not (PLACE / "bin" / "python").exists():
        venv.create(PLACE, with_pip=True)
    python = str(PLACE / "bin" / "python")
    made = run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *TOOLS)
    if made.returncode:
        last = (made.stderr.strip().splitlines() or [""])[-1]
        print(f"audit: SKIPPED, {' and '.join(TOOLS)} could not be installed ({last[:100]})")
        return 0
    bad = False
    for check, name in ((vulnerabilities, "pip-audit"), (secrets, "detect-secrets")):
        for is_bad, words in check(PLACE / "bin" / name):
            bad |= is_bad
            print(words, flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
