"""What README and docs show exists: commands, options, files, and the lines that are printed.

Blocks that begin with `$ hetplan` are run. The lines shown below a command must be printed by it
today, in this order; `...` stands for lines, and at the end of a line for the rest of it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference_pages
from typer.testing import CliRunner

from hetplan.cli.main import ENTRIES, app, load_command
from hetplan.cluster.catalogue import load_catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^\$? *|-m )hetplan (.*)$", re.MULTILINE)


RUN = re.compile(r"^\$ hetplan ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
RUNNABLE = {
    "init", "plan", "estimate", "explain", "report", "import", "check", "doctor", "emit", "replan",
}  # fmt: skip
"""The others measure, train or need root."""
MAX_PAGES, MAX_WORDS, MAX_README_WORDS = 22, 25_000, 900
MAX_DRIFT = 0.02
"""Numbers may differ so much, relatively: last digits depend on the machine."""


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


def runs(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """(words, lines shown) of every command of the page that can be run here, in order."""
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for command, shown in RUN.findall(block):
            words = shlex.split(command.replace("\\\n", " "))
            if words[0] in RUNNABLE:
                yield words, shown.splitlines()


def same_line(shown: str, printed: str) -> bool:
    """Equal but for spaces and for numbers that drift."""
    printed = " ".join(printed.split())
    start = shown.removesuffix("...").rstrip()
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    texts, numbers = number.split(" ".join(start.split())), number.findall(start)
    other_texts, others = number.split(printed), number.findall(printed)
    if shown.endswith("..."):
        other_texts, others = other_texts[: len(texts)], others[: len(numbers)]
        other_texts[-1] = other_texts[-1][: len(texts[-1])]
    pairs = zip(numbers, others, strict=False)
    return texts == other_texts and all(
        math.isclose(*(float(n.replace(",", "")) for n in pair), rel_tol=MAX_DRIFT)
        for pair in pairs
    )


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the page and compare what they print."""
    for path in (ROOT / "configs", ROOT / "docs", *(ROOT / "docs" / "examples").iterdir()):
        (folder / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):  # no profiles of the tester's own
        monkeypatch.setenv(name, str(folder))
    for words, shown in runs(page):
        printed = iter(CliRunner().invoke(app, words).output.splitlines())
        for line in shown:
            if line.strip() != "...":
                found = any(same_line(line, other) for other in printed)
                assert found, (
                    f"{page.name}: `hetplan {shlex.join(words)}` prints no such line: {line}"
                )


RUN_PAGES = [page for page in PAGES if any(shown for _, shown in runs(page))]
SLOW_PAGES = [
    page for page in RUN_PAGES if any(words[0] in {"plan", "estimate"} for words, _ in runs(page))
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow if p in SLOW_PAGES else ()) for p in RUN_PAGES],
    ids=lambda page: page.stem,
)
def test_commands_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, tmp_path, monkeypatch)


def test_a_line_that_is_not_printed_is_noticed() -> None:
    printed = "step  50.35 s (p10 43.82 s), 124,959 tokens/s, predicted"
    assert same_line("step 50.4 s (p10 43.82 s), 124,959 tokens/s, predicted", printed)
    assert same_line("step 50.35 s (p10 ...", printed)
    assert not same_line("step 60.35 s (p10 ...", printed)
    assert not same_line("step 50.35 s", printed)
    assert not same_line("steps 50.35 s ...", printed)


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == reference_pages.PAGES[name](), "out of date; " + reference_pages.REFRESH


def test_pages_are_few_short_and_linked_from_the_readme() -> None:
    words = sum(len(page.read_text().split()) for page in PAGES[1:])
    assert len(PAGES) - 1 <= MAX_PAGES
    assert words <= MAX_WORDS
    readme = PAGES[0].read_text()
    assert len(readme.split()) < MAX_README_WORDS
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in readme] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in headings(path), f"{page.name}: {target}#{anchor}"


def test_files_that_pages_name_exist() -> None:
    tops = "hetplan|tests|configs|evaluation|docs|profiles"
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_names_that_the_page_of_extensions_sends_to_are_there() -> None:
    text = " ".join((ROOT / "docs" / "extending.md").read_text().split())
    named = re.findall(
        r"`(\w+)`(?: \([^)]*\))?(?: and to `\w+`)? (?:in|of) `(hetplan/[\w/]+\.py)`", text
    )
    assert len(named) >= 7
    for name, path in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{name} is not in {path}"


def test_the_device_kind_of_the_page_of_extensions_is_right(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```yaml\n(schema: hetplan.devices.*?)^```",
        (ROOT / "docs" / "extending.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "acme.yaml").write_text(block)
    assert [kind.vendor for kind in load_catalogue(tmp_path)] == ["acme"]


def test_paths_of_the_architecture_page_exist() -> None:
    """Paths are from the root or `hetplan/`; in a room's row and after a path, from there."""
    near = [parent for parent in (ROOT / "hetplan").rglob("*") if parent.is_dir()]
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        paths = re.findall(r"`([\w./*-]*(?:/|\.py))`", line)
        room = paths[0] if line.startswith("| `") and paths else ""
        for path in paths:
            places = [ROOT, ROOT / "hetplan", ROOT / room, ROOT / "hetplan" / room]
            found = (place for place in ([*places, *near] if not room else places))
            assert any([*place.glob(path.rstrip("/"))] for place in found), f"{path} in: {line}"
