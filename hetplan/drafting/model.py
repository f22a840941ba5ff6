"""Which model somebody means: a file, or the name of a shipped one as people and hubs write it.

`meta-llama/Llama-3.1-70B-Instruct`, `llama-3-70b` and, if one model has that size, `70b` mean a
file of configs/models. Sizes must be equal, and of versions the number before the dot: 3.1 is 3's
shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.shipped import shipped_folder

HUB = "https://huggingface.co/ORG/NAME/blob/main/config.json"
_WORD = re.compile(r"\d+x\d+b|[a-z]?\d+(?:\.\d+)?b|\d+(?:\.\d+)?|[a-z]+", re.ASCII)
_SIZE = re.compile(r"(?:\d+x\d+|[a-z]?\d+(?:\.\d+)?)b", re.ASCII)
_NOT_SHAPE = {"instruct", "chat", "base", "hf", "it", "v", "meta", "0.1"}
"""Words of names that say how a model was trained or stored."""
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class MeantModel:
    """The file of a model."""

    path: Path
    note: str = ""
    """What the name was taken for, where it says more than the file."""


def meant_model(text: str) -> MeantModel:
    """The file that is there, or the shipped model of this name; an InputError otherwise."""
    path = Path(text)
    try:
        if (path / "config.json").is_file():
            return MeantModel(path / "config.json")
        if path.is_file() or path.suffix in (".json", ".yaml", ".yml"):
            return MeantModel(path)  # one that is not there is a fault of who reads it
    except (OSError, ValueError):  # too long, or a NUL: no file, and no model either
        pass
    known = shipped_models()
    if text in known:
        return MeantModel(known[text])
    fits = [name for name in known if _fits(text, name)]
    if len(fits) == 1:
        (name,) = fits
        exact = set(_words(text)) <= set(_words(name))
        return MeantModel(known[name], "" if exact else f"{_shown(text)} is taken as {name}")
    if fits:
        message = f"may be each of {', '.join(fits)}"
    else:
        near = get_close_matches("-".join(_words(text)), known, n=3, cutoff=0.5) or [*known]
        message = (
            f"is no file and no shipped model; nearest: {', '.join(near)}. For any other save the "
            f"config.json of its Hugging Face page ({HUB}) and give --model config.json"
        )
    raise InputError(Fault(field=f"--model {_shown(text)}", message=message))


def shipped_models() -> dict[str, Path]:
    """Name and file of every model of configs/models."""
    folder = shipped_folder("configs") / "models"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _shown(text: str) -> str:
    return ascii(text[:80])[1:-1]


def _words(text: str) -> list[str]:
    """Family, version and size of a name without its owner."""
    name = text[:_MAX_NAME].lower().rpartition("/")[2]
    return [word for word in _WORD.findall(name) if word not in _NOT_SHAPE]


def _fits(text: str, name: str) -> bool:
    """Whether each word of the text is one of the model's name."""
    has, asked = _words(name), _words(text)
    return bool(asked) and all(any(_same(word, other) for other in has) for word in asked)


def _same(asked: str, has: str) -> bool:
    if _SIZE.fullmatch(asked) or not asked[0].isdigit():
        return asked == has
    return has[0].isdigit() and asked.partition(".")[0] == has.partition(".")[0] and has[-1] != "b"


def model_lines(path: Path) -> Iterator[str]:
    """The lines of a shipped model's file that are right in another folder."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# yaml-language-server:"):
            yield line
