"""The page docs/clusters.md as commands, files and outputs.

`python tests/importers/cluster_page.py` runs the page's commands and writes their outputs
and the files that it shows into the page.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path

from typer.testing import CliRunner

from hetplan.cli.main import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "clusters.md"
EXAMPLES = DOCS / "examples"
_FILE = re.compile(r"(<!-- file: (\S+) -->\n```\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"(^```console\n\$ ((?:[^\n]*\\\n)*[^\n]*)\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL
)


def shown_files(text: str) -> list[tuple[str, str]]:
    """(name, content) of every file that the page shows."""
    return [(name, content) for _, name, content, _ in _FILE.findall(text)]


def shown_runs(text: str) -> list[tuple[str, str]]:
    """(command, output) of every command that the page shows, in order."""
    return [(command, output) for _, command, output, _ in _RUN.findall(text)]


def filled(text: str) -> str:
    """The page with the files and outputs as they are now."""
    text = _FILE.sub(
        lambda found: found[1] + (EXAMPLES / found[2]).read_text().rstrip("\n") + "\n" + found[4],
        text,
    )
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for path in EXAMPLES.iterdir():
            shutil.copy(path, folder)
        return _RUN.sub(lambda found: found[1] + output(found[2]) + found[4], text)


def output(command: str) -> str:
    """What the command prints, without spaces at line ends and empty lines around it."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] == "cat":
        printed = Path(words[1]).read_text()
    else:
        assert words[0] == "hetplan", command
        printed = CliRunner().invoke(app, words[1:]).output
    lines = [line.rstrip() for line in printed.splitlines()]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
