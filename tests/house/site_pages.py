"""Hooks of mkdocs.yml: README is the first page, its list of pages the menu.

Links stay as on GitHub, from file to file of the repository. Here a linked file outside of docs/
becomes part of the site, and a linked folder a page that lists its files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def sources() -> Iterator[Path]:
    """README, the pages of docs, and the pages outside of it that they link to."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        yield page
        linked = (ROOT / path for path in repository_links(page))
        pages += [path for path in linked if path.suffix == ".md" and path not in pages]


def repository_links(page: Path) -> list[str]:
    """The files and folders of the repository that a page links to, from its root."""
    folder = page.parent.relative_to(ROOT).as_posix()
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return [posixpath.normpath(posixpath.join(folder, link)) for link in links]


def site_path(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    name = path.removeprefix("docs/")
    return f"{name}/index.md" if (ROOT / path).is_dir() else name


def on_config(config: Any) -> Any:
    """The menu: README's list under Documentation."""
    listed = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation")[2]
    config["nav"] = [{"hetplan": "index.md"}]
    for title, items in re.findall(r"^- \*\*(.*?)\*\*:?(.*?)(?=^- |^\S|\Z)", listed, re.M | re.S):
        links = re.findall(r"\[([^\]]*)\]\(([^)#]*)\)", " ".join(items.split()))
        pages = ((text[:1].upper() + text[1:], path) for text, path in links)
        entries = [{text: site_path(path)} for text, path in pages if path.endswith(".md")]
        config["nav"].append({title: entries})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds README and everything outside of docs that pages link to."""
    pages = [*sources()]
    linked = {path for page in pages for path in repository_links(page)}
    for path in sorted(linked | {page.relative_to(ROOT).as_posix() for page in pages}):
        place = site_path(path)
        if (ROOT / path).is_dir():
            files.append(File.generated(config, place, content=listing(path)))
        elif files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def listing(folder: str) -> str:
    """A page with the names of a folder's files."""
    names = sorted(
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    )
    return "\n".join([f"# {folder}", "", *(f"- {name}" for name in names)]) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository, as links between pages of the site."""
    place = page.file.src_uri
    folder = "docs" if (ROOT / "docs" / place).exists() else ""
    here = posixpath.dirname(place)

    def in_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(site_path(path), here or ".")

    return LINK.sub(in_site, markdown)
