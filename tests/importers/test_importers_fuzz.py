"""Whatever an importer is given, it answers with records or with a clean error, and soon.

`make fuzz` runs the slow tests: more than 10,000 inputs over all kinds. FUZZ_SEED is another
number for other inputs; an input that fails is printed.
"""

from __future__ import annotations

import os
import random
import time
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importers_golden_inputs import golden_inputs
from importers_mutations import mutated

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.importers.kinds import KINDS, ImporterKind
from hetplan.importers.records import IMPORT_SCHEMA, ImportContext, Imported

SEED = int(os.environ.get("FUZZ_SEED", "0"))
INPUTS_PER_KIND = 4_000  # 14 kinds: 56,000 inputs, and 1,400 texts of hypothesis
QUICK_INPUTS_PER_KIND = 60
# Against a hang, which only time shows (work inside regular expressions): 200 times the slowest
# answer to a golden input (25 ms).
BOUND_SECONDS = 5.0


def answer(kind: ImporterKind, text: str, context: ImportContext) -> Imported | None:
    """What the importer makes of the text; None: a clean error. Fails for anything else."""
    shown = repr(text[:4000])
    began = time.process_time()
    try:
        imported = kind.parse(text, context)
    except InputError as error:
        imported = None
        message = str(error)
        assert context.file in message, f"the error names no file: {message[:300]}\n{shown}"
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
    return imported


def fuzz(kind: ImporterKind, count: int) -> tuple[int, int]:
    """(inputs that gave records, inputs that gave an error)."""
    rng = random.Random(zlib.crc32(kind.kind.encode()) ^ SEED)
    goldens = golden_inputs(kind)
    texts = [golden.text for golden in goldens]
    contexts = [golden.context for golden in goldens]
    read = refused = 0
    for _ in range(count):
        which = rng.randrange(len(goldens))
        if answer(kind, mutated(rng, texts[which]), contexts[which]) is None:
            refused += 1
        else:
            read += 1
    return read, refused


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_changed_inputs_are_read_or_refused(kind: ImporterKind) -> None:
    read, refused = fuzz(kind, QUICK_INPUTS_PER_KIND)
    assert read + refused == QUICK_INPUTS_PER_KIND
    assert refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_many_changed_inputs_are_read_or_refused(kind: ImporterKind) -> None:
    assert INPUTS_PER_KIND * len(KINDS) >= 10_000
    read, refused = fuzz(kind, INPUTS_PER_KIND)
    print(f"{kind.kind}: {read + refused} inputs, {read} read, {refused} refused")
    assert read > 0
    assert refused > 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_golden_input_survives_a_cut_at_every_line(kind: ImporterKind) -> None:
    for golden in golden_inputs(kind):
        lines = golden.text.splitlines(keepends=True)
        step = max(1, len(lines) // 12)
        for at in range(0, len(lines), step):
            answer(kind, "".join(lines[:at]), golden.context)
            answer(kind, "".join(lines[:at]) + lines[at][: len(lines[at]) // 2], golden.context)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "\ufeff",
        "\x00",
        "{}",
        "[]",
        "[{}]",
        "null",
        "7",
        '"a"',
        "{" * 100_000,
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 100_000,
        " " * 100_000,
        "a" * 100_000,
        "-" * 100_000,
        "#" * 100_000,
        "1 " * 50_000,
        "\n" * 100_000,
        "\t\r\x0b\x0c\x1c\x85\u2028",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_extreme_texts_are_refused_or_read(kind: ImporterKind, text: str) -> None:
    answer(kind, text, golden_inputs(kind)[0].context)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_any_text_is_refused_or_read(kind: ImporterKind) -> None:
    context = golden_inputs(kind)[0].context

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=st.text(max_size=400))
    def check(text: str) -> None:
        answer(kind, text, context)

    check()
