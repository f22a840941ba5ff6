"""Every hetplan command that README and docs show exists, with every option that they give it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from hetplan.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^\$? *|-m )hetplan (.*)$", re.MULTILINE)


def calls(page: Path) -> list[list[str]]:
    blocks = "\n".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
    return [shlex.split(found.split(" > ")[0]) for found in CALL.findall(blocks)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in calls(page):
        assert words[0] in commands, f"{page.name} shows `hetplan {words[0]}`"
        command = commands[words[0]]
        if hasattr(command, "commands"):
            command = command.commands.get(words[1]) or command.commands["run"]
        known = {option for each in command.params for option in each.opts}
        used = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        assert used <= known | {"--help"}, f"`hetplan {shlex.join(words)}` has unknown options"


def test_the_pages_show_commands() -> None:
    assert sum(len(calls(page)) for page in PAGES) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
