"""A text stays what it is in scripts and in YAML: one word, one value."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.schedulers.quoting import file_name, folder_word, word, words, yaml_text

HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a' b",
    'a" b',
    "~root",
    "*",
    "[0]=x",
    "$HOME ${x:-y}",
    "-n",
    "!!",
    "\\",
    "a\\",
    "",
    " ",
    "ü✓",
    "{a,b}",
    "#no",
    "a=b",
    "<(true)",
    "%s",
)
PRINTABLE = st.text(
    st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=("Cs",)),
    max_size=30,
)


def heard(script: str) -> list[str]:
    """What bash's printf is given, word by word."""
    done = subprocess.run(
        ["bash", "-c", f"folder='/the folder/$x'\na=(\n{script}\n)\nprintf '%s\\0' \"${{a[@]}}\""],
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=25, deadline=None)
@example(list(HOSTILE))
@given(st.lists(PRINTABLE, min_size=1, max_size=20))
def test_any_printable_text_is_a_single_word(texts: list[str]) -> None:
    assert heard(" ".join(word(each) for each in texts)) == texts
    there = [each.replace("{folder}", "/the folder/$x") for each in texts]
    assert heard(words(texts)) == there


@pytest.mark.parametrize("text", ["a\nb", "a\0b", "a\tb", "a\rb", "\x1b[0m", "a\x7f", "a\udc80"])
def test_control_characters_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="control character"):
        word(text)
    with pytest.raises(InputError, match="control character"):
        folder_word(text)


@pytest.mark.parametrize("text", [*HOSTILE, "../../etc/passwd", ".bashrc", "a/b", "x" * 300, "..."])
def test_file_names_are_names_of_files(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", file_name(text))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@settings(deadline=None)
@example({"\x85": "\u2028\n"})
@given(VALUES)
def test_yaml_reads_back_as_it_was(value: object) -> None:
    assert yaml.safe_load(yaml_text(value)) == value
