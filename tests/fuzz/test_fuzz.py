"""Whatever is read or emitted: a changed input gives a value or a clean error, soon.

`make fuzz` tries a million inputs (CASES, SEED) and keeps the smallest of each fault in corpus/.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_forms import FORMS, Form
from fuzz_run import answered, corpus, corpus_text, fuzz, limits, prepared, whole

from hetplan.errors import HetplanError

READ_CASES, EMITTED_CASES = 190, 50
"""On every commit, of each form: 10,000 in all."""
KEPT = list(corpus())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_changed_inputs_give_a_value_or_a_clean_error(form: Form, tmp_path: Path) -> None:
    path = prepared(form, tmp_path)
    assert any(answered(form, path, text) for text in form.seeds())
    tally = fuzz(form, EMITTED_CASES if form.is_emitted else READ_CASES, 0)
    assert not tally.faults, "".join(tally.faults[0])
    # The changes are neither all harmless nor all fatal.
    assert tally.read > 0


def test_ten_thousand_inputs_are_tried() -> None:
    emitted = sum(form.is_emitted for form in FORMS)
    assert emitted * EMITTED_CASES + (len(FORMS) - emitted) * READ_CASES >= 10_000


@pytest.mark.parametrize(
    ("form", "path"), KEPT, ids=[f"{form.name}-{path.stem}" for form, path in KEPT]
)
def test_what_once_failed_is_read_or_refused(form: Form, path: Path, tmp_path: Path) -> None:
    answered(form, prepared(form, tmp_path), whole(form, corpus_text(path)))


EXTREME = (
    *("", "\n\n", "\ufeff", "\x00", "{}", "[]", "[{}]", "null", "7", '"a"', "1 " * 50_000),
    *(piece * 100_000 for piece in ("{", "[", '{"a":', "9", " ", "a", "-", "#", "\n")),
    "\t\r\x0b\x0c\x1c\x85\u2028",
)


@pytest.mark.parametrize(
    "form", [each for each in FORMS if not each.is_emitted], ids=lambda form: form.name
)
def test_extreme_texts_are_read_or_refused(form: Form, tmp_path: Path) -> None:
    path = prepared(form, tmp_path)
    for text in EXTREME:
        answered(form, path, text)


ODD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "empty": Path.touch,
    "10 GB": lambda path: (path.touch(), os.truncate(path, 10**10)),
}
NOTHING_YET = ("devices", "sweep-table", "run-log", "journal")
"""Where no file, or nothing in it, is no fault."""
TOLD = ("store", "check")
"""What is wrong with one file is in the answer about all."""


@pytest.mark.parametrize(
    "form",
    # The others are read from texts.
    [each for each in FORMS if not each.is_emitted and each.file != "words"],
    ids=lambda form: form.name,
)
def test_what_is_no_text_of_a_file_is_refused_in_one_line(form: Form, tmp_path: Path) -> None:
    path = prepared(form, tmp_path)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits"))
    for odd, make in ODD.items():
        if odd == "10 GB" and form.name.startswith("training-log"):
            continue  # logs are read line by line, whatever their size
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        make(path)
        signal.alarm(120)
        told = ""
        try:
            with limits():
                form.read(path)
        except HetplanError as error:
            told = str(error)
        finally:
            signal.alarm(0)
        if told:
            assert path.name in told
            assert len(told.splitlines()) == 1
        else:
            nothing = form.name in NOTHING_YET and odd in ("missing", "loop", "empty")
            assert nothing or form.name in TOLD, odd
    signal.signal(signal.SIGALRM, handler)
