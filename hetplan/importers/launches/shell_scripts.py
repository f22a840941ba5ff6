"""Which further scripts does a command of a script hold: in its words, or in a here-document?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from hetplan.importers.launches.shell_nodes import Simple
from hetplan.importers.launches.shell_values import Field, Piece, line_of_field, text_of_field

Marks: TypeAlias = tuple[tuple[int, int], ...]
"""(place in a text, line of the script)."""
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))
_REMOTE = frozenset(("ssh", "pdsh", "clush"))
_MAX_PERHAPS = 1 << 16
_WRITES = frozenset(("cat", "tee"))


def scripts_in(words: tuple[Field, ...], simple: Simple) -> Iterator[tuple[str, Marks]]:
    """Scripts that a command is given: `bash -c TEXT`, `eval`, `sbatch << END`."""
    texts = [text_of_field(word) for word in words]
    if texts[0] == "eval" and len(texts) > 1:
        space = Piece(text=" ", line=line_of_field(words[-1]))
        yield _marked(tuple(piece for word in words[1:] for piece in (*word, space)))
        return
    for at, text in enumerate(texts[:-1]):
        # Options may stand between the shell and -c, or be written together with it: -lc.
        if text.rpartition("/")[2] in _SHELLS:
            for after in range(at + 1, min(at + 6, len(texts) - 1)):
                if re.fullmatch(r"-[a-z]*c", texts[after]):
                    yield _marked(words[after + 1])
                    return
    if texts[0].rpartition("/")[2] in (*_SHELLS, "sbatch", "ssh", "srun"):
        for document in simple.documents:
            yield document.text, ((0, document.line),)


def perhaps_scripts(words: tuple[Field, ...], simple: Simple) -> Iterator[tuple[str, Marks]]:
    """Texts that are scripts where they can be read as such: `ssh HOST TEXT`, `cat > FILE << END`.

    Whether another command runs the file, and with which variables, is for its host to know.
    """
    command = text_of_field(words[0]).rpartition("/")[2]
    found: list[tuple[str, Marks]] = []
    if command in _REMOTE:
        found += [_marked(word) for word in words[1:] if " " in text_of_field(word)]
    elif command in _WRITES:
        found += [(document.text, ((0, document.line),)) for document in simple.documents]
    for text, marks in found:
        if len(text) <= _MAX_PERHAPS:
            yield text, marks


def _marked(field: Field) -> tuple[str, Marks]:
    """The text of a word, and on which line each of its pieces stands."""
    text, marks = "", []
    for piece in field:
        marks.append((len(text), piece.line))
        text += piece.text
    return text, tuple(marks) or ((0, 1),)
