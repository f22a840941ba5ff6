"""Whatever an importer is given, it answers with records or with a clean error, and soon.

`make fuzz` runs the slow tests: 36,000 inputs. FUZZ_SEED is another
number for other inputs; an input that fails is printed.
"""

from __future__ import annotations

import os
import random
import time
import zlib

import pytest
from importers_golden_inputs import CONTEXT, GOLDEN_INPUTS
from importers_mutations import mutated

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.importers.records import IMPORT_SCHEMA, Imported
from hetplan.importers.table import IMPORTERS, Importer

SEED = int(os.environ.get("FUZZ_SEED", "0"))
INPUTS_PER_KIND = 4_000  # 9 kinds: 36,000 inputs
QUICK_INPUTS_PER_KIND = 40
# Against a hang, which only time shows (work inside regular expressions): 200 times the slowest
# answer to a golden input (25 ms).
BOUND_SECONDS = 5.0


def answer(kind: Importer, text: str) -> Imported | None:
    """What the importer makes of the text; None: a clean error. Fails for anything else."""
    shown = repr(text[:4000])
    began = time.process_time()
    try:
        imported = kind.parse(text, CONTEXT)
    except InputError as error:
        imported = None
        message = str(error)
        assert CONTEXT.file in message, f"the error names no file: {message[:300]}\n{shown}"
        printable = message.replace("\n", "")
        assert not printable or printable.isprintable(), f"{message[:300]!r} for {shown}"
        assert len(message) < 20_000, f"an error of {len(message)} characters for {shown}"
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {shown}") from error
    seconds = time.process_time() - began
    assert seconds < BOUND_SECONDS, f"{seconds:.1f} s for {shown}"
    if imported is not None:
        assert isinstance(imported, Imported)
        assert imported.kind == kind.kind
        encode(imported, schema=IMPORT_SCHEMA).encode("utf-8")
        if imported.topology is not None:
            count = len(imported.topology.devices) + len(imported.topology.nics)
            assert len(imported.topology.paths) == count * (count - 1) // 2, shown
    return imported


def texts_of(kind: Importer) -> list[str]:
    return [golden.text for golden in GOLDEN_INPUTS if golden.importer == kind]


def fuzz(kind: Importer, count: int) -> tuple[int, int]:
    """(inputs that gave records, inputs that gave an error)."""
    rng = random.Random(zlib.crc32(kind.kind.encode()) ^ SEED)
    texts = texts_of(kind)
    answers = [answer(kind, mutated(rng, rng.choice(texts))) for _ in range(count)]
    return sum(each is not None for each in answers), answers.count(None)


@pytest.mark.parametrize("kind", IMPORTERS, ids=lambda kind: kind.kind)
def test_changed_inputs_are_read_or_refused(kind: Importer) -> None:
    read, refused = fuzz(kind, QUICK_INPUTS_PER_KIND)
    assert read + refused == QUICK_INPUTS_PER_KIND
    assert refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMPORTERS, ids=lambda kind: kind.kind)
def test_many_changed_inputs_are_read_or_refused(kind: Importer) -> None:
    assert INPUTS_PER_KIND * len(IMPORTERS) >= 10_000
    read, refused = fuzz(kind, INPUTS_PER_KIND)
    print(f"{kind.kind}: {read + refused} inputs, {read} read, {refused} refused")
    assert read > 0
    assert refused > 0


EXTREME_TEXTS = (
    *("", "\n\n", "\ufeff", "\x00", "{}", "[]", "[{}]", "null", "7", '"a"', "1 " * 50_000),
    *(piece * 100_000 for piece in ("{", "[", '{"a":', "9", " ", "a", "-", "#", "\n")),
    "\t\r\x0b\x0c\x1c\x85\u2028",
)


@pytest.mark.parametrize("kind", IMPORTERS, ids=lambda kind: kind.kind)
def test_extreme_texts_are_refused_or_read(kind: Importer) -> None:
    for text in EXTREME_TEXTS:
        answer(kind, text)


def test_a_time_too_small_to_be_a_float_of_seconds_is_skipped() -> None:
    """As microseconds it is a float above 0."""
    (kind,) = (kind for kind in IMPORTERS if kind.kind == "rccl-tests")
    (text, *_) = (text for text in texts_of(kind) if '"time": 500.0' in text)
    imported = answer(kind, text.replace('"time": 500.0', '"time": 1e-320', 1))
    assert imported is not None
    assert any("the time is 0" in each for each in imported.skipped)
