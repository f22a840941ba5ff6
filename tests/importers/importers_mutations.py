"""Inputs that are nearly right: golden inputs that were cut off or changed, hostile values."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

HOSTILE = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "-1",
    "0",
    "-0.0",
    "1e-320",
    "9" * 400,
    "9" * 5000,
    "1." + "0" * 400,
    "true",
    "null",
    '""',
    '"\\ud800"',
    "[]",
    "{}",
    "\u0663\u0664",  # digits, but not ASCII
    "\u00b2",
    "0x10",
    "1_000",
    "[" * 3000,
    "\x00",
    "\u2028",
    " " * 3000,
)


def cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(0, len(text))]


def change_bytes(rng: random.Random, text: str) -> str:
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return data.decode("utf-8", "replace")


def change_number(rng: random.Random, text: str) -> str:
    numbers = list(re.finditer(r"\d+(?:\.\d+)?", text))
    if not numbers:
        return text
    found = rng.choice(numbers)
    return text[: found.start()] + rng.choice(HOSTILE) + text[found.end() :]


def change_word(rng: random.Random, text: str) -> str:
    words = list(re.finditer(r"[A-Za-z_]{2,}", text))
    if not words:
        return text
    found = rng.choice(words)
    other = rng.choice((*HOSTILE, rng.choice(words).group()))
    return text[: found.start()] + other + text[found.end() :]


def change_lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.randrange(4)
    if action == 0:
        del lines[one]
    elif action == 1:
        lines.insert(other, lines[one])
    elif action == 2:
        lines[one], lines[other] = lines[other], lines[one]
    else:
        lines[one] = lines[one] + lines[other]
    return "\n".join(lines)


def repeat_a_piece(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    piece = text[at : at + rng.randint(1, 30)]
    return text[:at] + piece * rng.choice((3, 30, 3000)) + text[at:]


MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (
    cut,
    change_bytes,
    change_bytes,
    change_number,
    change_number,
    change_word,
    change_lines,
    repeat_a_piece,
)


def mutated(rng: random.Random, text: str) -> str:
    """One or more changes of the text."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(MUTATIONS)(rng, text)
    return text
