"""Which variables do a script's commands set, and which files beside it do they read?

read NAME, mapfile NAME, printf -v NAME, getopts OPTIONS NAME, let NAME=1+2, ((NAME = 1 + 2))
source ./env.sh, . "$(dirname "$0")/env.sh"
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from hetplan.errors import InputError
from hetplan.files.reading import read_text
from hetplan.importers.launches.shell_values import Field, text_of_field
from hetplan.importers.launches.shell_words import Part, PartKind, Word

LET = "let"
"""The command as which ((...)) is read."""
_MAX_SOURCED = 1 << 18
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SET = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?"
    r"(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))",
    re.ASCII,
)
_ONE = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)([^=,?:&|<>!~^]+)", re.ASCII)
# The folder of the script itself, as scripts ask for it.
_OWN_FOLDER = re.compile(
    r"\$\(.*\bdirname\b.*(?:\$0|\$\{0\}|BASH_SOURCE).*\)"
    r"|`\s*dirname\s.*(?:\$0|\$\{0\}|BASH_SOURCE).*`"
    r"|\$\{(?:0|BASH_SOURCE|BASH_SOURCE\[0\])%/\*\}",
    re.ASCII,
)
# Options of these commands that take a value, so that it is no name.
_WITH_VALUE = {
    "read": ("-d", "-i", "-n", "-N", "-p", "-t", "-u"),
    "mapfile": ("-d", "-n", "-O", "-s", "-u", "-C", "-c"),
}


def names_set(words: list[Field]) -> tuple[str, ...]:
    """Variables that a command sets to what only the host knows."""
    texts = [text_of_field(word) for word in words]
    command = {"readarray": "mapfile"}.get(texts[0], texts[0])
    if command == LET:
        found = [a or b for text in texts[1:] for a, b in _SET.findall(text)]
    elif command == "printf":
        found = texts[2:3] if texts[1:2] == ["-v"] else []
    elif command == "getopts":
        found = [*texts[2:3], "OPTARG", "OPTIND"]
    elif command in _WITH_VALUE:
        found = _operands(texts[1:], _WITH_VALUE[command])
        if not found:
            found = ["REPLY" if command == "read" else "MAPFILE"]
    else:
        found = []
    return tuple(dict.fromkeys(name for name in found if _NAME.fullmatch(name)))


def _operands(texts: list[str], with_value: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(texts):
        if texts[at] in (*with_value, "-a"):
            # `read -a NAME` puts the words into a list.
            found += texts[at + 1 : at + 2] if texts[at] == "-a" else []
            at += 1
        elif not texts[at].startswith("-"):
            found.append(texts[at])
        at += 1
    return found


def counted(word: Field, line: int) -> tuple[str, Word] | None:
    """The one variable that an expression of let sets, and the arithmetic of its value.

    None where it does more, or something that is not counted here.
    """
    found = _ONE.fullmatch(text_of_field(word))
    if found is None or any(piece.unknown for piece in word):
        return None
    name, sign, value = found.groups()
    text = f"{name}{sign}({value})" if sign else value
    part = Part(
        kind=PartKind.ARITHMETIC, text=text, line=line, quoted=True, shown=f"$(({text.strip()}))"
    )
    return name, (part,)


def sourced_text(file: str, word: Field) -> tuple[Path, str] | None:
    """Path and text of the file that `source WORD` reads, where it stands beside the script.

    Beside: in its folder or one in that, by a path that does not lead out of it. None for others.
    """
    name = text_of_field(word)
    if word and word[0].unknown and _OWN_FOLDER.fullmatch(word[0].text):
        name = text_of_field(word[1:])
        if not name.startswith("/") or any(piece.unknown for piece in word[1:]):
            return None
        name = name.lstrip("/")
    elif any(piece.unknown for piece in word):
        return None
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        return None
    folder = Path(file).parent
    try:
        path = folder / relative
        inside = path.resolve().is_relative_to(folder.resolve())
        if not inside or not path.is_file() or path.stat().st_size > _MAX_SOURCED:
            return None
        return path, read_text(path).replace("\r\n", "\n")
    except (OSError, ValueError, RuntimeError, InputError):
        return None
