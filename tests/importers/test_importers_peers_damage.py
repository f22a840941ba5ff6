"""A damaged file of a peer gives records or an InputError with a name, never another error."""

from __future__ import annotations

import copy
import json
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from importers_golden_inputs import EVERY_INPUT, GoldenInput

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.importers.records import IMPORT_SCHEMA, ImportContext

PEERS = ("sailor", "sailor-network", "metis", "galvatron", "simumax")
INPUTS = [golden for golden in EVERY_INPUT if golden.kind.kind in PEERS]
TIMES = 100  # per input; the fuzz target has the thousands


@cache
def original(golden: GoldenInput) -> str:
    return golden.text


@cache
def asked(golden: GoldenInput) -> ImportContext:
    return golden.context


def survives(golden: GoldenInput, text: str) -> None:
    """Records that can be written, or faults that name the file."""
    faults: tuple[Fault, ...] = ()
    try:
        imported = golden.kind.parse(text, asked(golden))
    except InputError as error:
        faults = error.faults
        str(error).encode("utf-8")
    else:
        encode(imported, schema=IMPORT_SCHEMA).encode("utf-8")
        return
    assert faults
    assert all(fault.message and fault.file == asked(golden).file for fault in faults)


@pytest.mark.parametrize("golden", INPUTS, ids=lambda golden: golden.name)
def test_truncation(golden: GoldenInput) -> None:
    text = original(golden)
    source = random.Random(golden.name)
    for _ in range(TIMES // 3):
        survives(golden, text[: source.randrange(len(text))])


@pytest.mark.parametrize("golden", INPUTS, ids=lambda golden: golden.name)
def test_changed_characters(golden: GoldenInput) -> None:
    text = original(golden)
    source = random.Random(golden.name)
    for _ in range(TIMES):
        letters = list(text)
        for _ in range(source.randint(1, 4)):
            letters[source.randrange(len(letters))] = source.choice('0123456789eE+-.,:"{}[] \\nud')
        survives(golden, "".join(letters))


STRANGE = (
    None,
    True,
    "",
    "0.5",
    "OOM",
    "\ud800",
    [],
    {},
    [[]],
    {"a": {}},
    0,
    -1,
    10**400,
    1e308,
    5e-324,
)


def places(value: object) -> list[tuple[object, object]]:
    """(container, key) of everything below this value."""
    found: list[tuple[object, object]] = []
    left = [value]
    while left:
        at = left.pop()
        children = (
            at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        )
        for key, child in children:
            found.append((at, key))
            left.append(child)
    return found


@pytest.mark.parametrize("golden", INPUTS, ids=lambda golden: golden.name)
def test_values_of_a_wrong_type_size_or_place(golden: GoldenInput) -> None:
    source = random.Random(golden.name)
    for _ in range(TIMES):
        data = json.loads(original(golden))
        for _ in range(source.randint(1, 2)):
            container, key = source.choice(places(data) or [({"x": 1}, "x")])
            action = source.randrange(3)
            if action == 0 or isinstance(container, list):
                container[key] = copy.deepcopy(source.choice(STRANGE))  # type: ignore[index]
            elif action == 1:
                del container[key]  # type: ignore[attr-defined]
            else:
                container[source.choice(("-1", "1e3", "\n", "\ud800", "999999999999"))] = (  # type: ignore[index]
                    container[key]  # type: ignore[index]
                )
        survives(golden, json.dumps(data, indent=source.choice((None, 1))))


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.sampled_from(INPUTS), garbage)
def test_any_json(golden: GoldenInput, value: object) -> None:
    survives(golden, json.dumps(value))


@given(st.sampled_from(INPUTS), st.text(max_size=40))
def test_any_text(golden: GoldenInput, text: str) -> None:
    survives(golden, text)
