"""A field's type says its limits once: files, values and JSON Schemas all keep them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import jsonschema
import pytest

from hetplan.errors import InputError
from hetplan.files.quantities import (
    Count,
    FileForm,
    Fraction,
    Positive,
    Seconds,
    check_limits,
    schema_text,
    value_of,
)
from hetplan.files.reading import decode, read_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Base(FileForm):
    """Fields that another form has too."""

    count: Count = 1
    """How many."""
    part: Fraction | None = None
    """How much of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Base):
    """As it is written."""

    wait: Seconds | None = None
    """How long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    count: Count
    part: Fraction = 0.5
    wait_seconds: Positive | None = None

    def __post_init__(self) -> None:
        check_limits(self)


WRONG = (
    ("count", 0, "at least 1"),
    ("count", 10**10, "at most 1,000,000,000"),
    ("part", 1.0, "below 1"),
    ("part", -0.1, "at least 0"),
    ("part", math.nan, "at least 0"),
    ("wait_seconds", 0.0, "above 0"),
    ("wait_seconds", math.inf, "finite"),
)


@pytest.mark.parametrize(("field", "number", "says"), WRONG)
def test_a_value_outside_its_limits_is_refused(field: str, number: float, says: str) -> None:
    with pytest.raises(InputError, match=f"^{field} is .*; it must be .*{says}"):
        Value(**{"count": 1, field: number})  # type: ignore[arg-type]


def test_forms_are_described_and_copied_by_the_names_of_their_fields(tmp_path) -> None:
    schema = json.loads(schema_text(Form, schema="hetplan.x/1", title="x"))
    described = {name: entry.get("description") for name, entry in schema["properties"].items()}
    assert described["count"] == "How many."
    assert described["part"] == "How much of it."
    assert described["wait"] == "How long."
    path = tmp_path / "x.json"
    for data, right in ({"count": 3, "wait": "2 s"}, True), ({"count": 0}, False):
        file = {"schema": "hetplan.x/1", **data}
        path.write_text(json.dumps(file))
        if right:
            jsonschema.validate(file, schema)
            form = decode(read_document(path), Form, schema="hetplan.x/1")
            assert value_of(Value, form, wait_seconds=form.wait) == Value(count=3, wait_seconds=2.0)
        else:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(file, schema)
            with pytest.raises(InputError, match="count: found 0; it must be at least 1"):
                decode(read_document(path), Form, schema="hetplan.x/1")
