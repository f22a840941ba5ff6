"""Attack classes and cases: what was tried, and whether something was lost, run, or a traceback.

As a program: `python tests/fuzz/attack_table.py`; every row is run now, but that of kills where
`--kills` names what `kill_matrix.py --log` wrote. A case is an input, a moment, or a test.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

TESTS = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path += [str(each) for each in TESTS.iterdir() if each.is_dir()]
    sys.path.insert(0, str(TESTS.parent))


@dataclass(frozen=True, slots=True)
class Attack:
    """One row."""

    name: str
    shows: str
    """Which of `lost`, `run` and `traceback` its cases look for."""
    tried: Callable[[], tuple[int, list[str]]]
    """Number of cases, and what was found."""


def of_tests(*words: str) -> Callable[[], tuple[int, list[str]]]:
    """These tests, slow ones left out."""

    def tried() -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "not slow", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=TESTS.parent, check=False
        )
        counts = {
            what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", done.stdout)
        }
        found = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
        if not counts or (done.returncode and not found):
            found = [f"the tests did not run: {done.stdout[-300:]}{done.stderr[-300:]}"]
        return sum(counts.values()), found

    return tried


def of_fuzz(cases: int) -> Callable[[], tuple[int, list[str]]]:
    """So many changed inputs, over all forms."""

    def tried() -> tuple[int, list[str]]:
        from fuzz_forms import FORMS
        from fuzz_run import fuzz

        tallies = [fuzz(form, -(-cases // len(FORMS)), 0, stop=False) for form in FORMS]
        faults = [f"{each.form.name}: {text[:80]!a}" for each in tallies for text, _ in each.faults]
        return sum(each.read + each.refused + len(each.faults) for each in tallies), faults

    return tried


def of_kills(logs: Sequence[Path]) -> Callable[[], tuple[int, list[str]]]:
    """The last rows of commands and signals in the logs; or a few moments of quick commands."""

    def tried() -> tuple[int, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows"
            if not logs:
                matrix = [
                    sys.executable,
                    str(TESTS / "kills" / "kill_matrix.py"),
                    "--log",
                    str(rows),
                ]
                words = ("--moments", "4", "--commands", "import,emit,fit,store rows")
                subprocess.run([*matrix, *words], stdout=subprocess.DEVNULL, check=False)
            text = "".join(each.read_text() for each in logs or (rows,))
            cells = [json.loads(line) for line in text.splitlines()]
        last = {(each["command"], each["signal"]): each for each in cells}
        found = [fault for each in last.values() for fault in each["faults"]]
        return sum(each["runs"] for each in last.values()), found

    return tried


def attacks(cases: int, kills: Sequence[Path]) -> Sequence[Attack]:
    quoting = ("tests/fuzz/test_fuzz_quoting.py", "tests/schedulers/test_schedulers_quoting.py")
    no_text = ("tests/fuzz/test_fuzz.py", "-k", "no_text or extreme or once_failed")
    two = ("tests/files/test_locks.py", "tests/cli/test_cli_two_at_once.py")
    pages = ("tests/reports/test_reports_html.py", "-k", "stay_text")
    return (
        Attack("files changed at random", "traceback", of_fuzz(cases)),
        Attack("pipes, loops, no end, no text", "traceback", of_tests(*no_text)),
        Attack("two at once", "lost traceback", of_tests(*two)),
        Attack(
            "memory, disk, files, streams",
            "lost traceback",
            of_tests("tests/cli/test_cli_limits.py"),
        ),
        Attack("edited plans", "lost traceback", of_tests("tests/cli/test_cli_edited_plan.py")),
        Attack("hostile words in scripts", "run traceback", of_tests(*quoting)),
        Attack("hostile words on pages", "run", of_tests(*pages)),
        Attack("SIGKILL, SIGTERM, SIGINT", "lost traceback", of_kills(kills)),
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="Inputs changed at random.")
    parser.add_argument(
        "--kills", type=Path, nargs="*", default=[], help="What kill_matrix.py --log wrote."
    )
    asked = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d}: nothing lost, run, or a traceback (-: not looked for)")
    print(f"{'attack':31}{'cases':>8}{'lost':>7}{'run':>6}{'traceback':>12}", flush=True)
    bad = 0
    for attack in attacks(asked.cases, asked.kills):
        count, found = attack.tried()
        bad += len(found)
        shown = [
            ("none" if not found else "FOUND") if each in attack.shows.split() else "-"
            for each in ("lost", "run", "traceback")
        ]
        print(f"{attack.name:31}{count:>8,}{shown[0]:>7}{shown[1]:>6}{shown[2]:>12}", flush=True)
        for each in found:
            print(f"  {each}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
