"""Every hetplan command that README and docs show exists, with every option that they give it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hetplan.cli.main import ENTRIES, load_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^\$? *|-m )hetplan (.*)$", re.MULTILINE)


def calls(page: Path) -> list[list[str]]:
    blocks = "\n".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
    return [shlex.split(found.split(" > ")[0]) for found in CALL.findall(blocks)]


def options_of(words: list[str]) -> set[str] | None:
    """The options of the command that the words call; None where there is none of that name."""
    if words[0] not in {entry.name for entry in ENTRIES}:
        return None
    command, rest = load_command(words[0]), words[1:]
    while hasattr(command, "commands"):
        named = rest[0] if rest and rest[0] in command.commands else command.default_command
        if named not in command.commands:
            return {"--help"} if rest in ([], ["--help"]) else None
        command, rest = command.commands[named], rest[rest[:1] == [named] :]
    names = (option for param in command.params for option in (*param.opts, *param.secondary_opts))
    return {"--help", *names}


def test_commands_that_are_shown_exist() -> None:
    assert sum(len(calls(page)) for page in PAGES) > 10
    for page in PAGES:
        for words in calls(page):
            known = options_of(words)
            assert known is not None, f"{page.name} shows `hetplan {shlex.join(words)}`"
            used = {word.split("=")[0] for word in words if word.startswith("--")}
            assert used <= known, f"{page.name}: `hetplan {shlex.join(words)}`: {used - known}"


def test_links_to_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paths_of_the_architecture_page_exist() -> None:
    """Paths are from the root or `hetplan/`; in a room's row and after a path, from there."""
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        paths = re.findall(r"`([\w./*-]*(?:/|\.py))`", line)
        room = paths[0] if line.startswith("| `") and paths else ""
        for path in paths:
            places = [ROOT, ROOT / "hetplan", ROOT / room, ROOT / "hetplan" / room]
            near = [parent for parent in (ROOT / "hetplan").rglob("*") if parent.is_dir()]
            found = (place for place in ([*places, *near] if not room else places))
            assert any([*place.glob(path.rstrip("/"))] for place in found), f"{path} in: {line}"
