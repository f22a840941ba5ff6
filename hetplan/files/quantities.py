"""What file forms are made of: types of fields with their units and limits, and JSON Schemas.

A quantity is text in the file and a float in SI base units after reading.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from textwrap import dedent
from types import UnionType
from typing import (
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.errors import InputError
from hetplan.files.encoding import laid_out
from hetplan.units import (
    COUNT_PATTERN,
    EXAMPLES,
    NAME_PATTERN,
    Dimension,
    parse_count,
    parse_quantity,
    pattern,
)

T = TypeVar("T")

NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+$"
"""A node as island/number."""


def _parser(dimension: Dimension) -> BeforeValidator:
    return BeforeValidator(lambda text: _quantity(lambda: parse_quantity(text, dimension)))


def _quantity(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except InputError as error:
        # pydantic collects this kind and goes on to the next field.
        raise PydanticCustomError("quantity", "{message}", {"message": str(error)}) from error


def _quantity_schema(dimension: Dimension) -> dict[str, Any]:
    examples = list(EXAMPLES[dimension])
    return {"type": "string", "pattern": pattern(dimension), "examples": examples}


def _json_schema(dimension: Dimension) -> WithJsonSchema:
    return WithJsonSchema(_quantity_schema(dimension))


Memory: TypeAlias = Annotated[float, _parser(Dimension.MEMORY), _json_schema(Dimension.MEMORY)]
"""`80 GiB` -> bytes."""
Bandwidth: TypeAlias = Annotated[
    float, _parser(Dimension.BANDWIDTH), _json_schema(Dimension.BANDWIDTH)
]
"""`200 Gbit/s` -> bytes per second."""
Seconds: TypeAlias = Annotated[float, _parser(Dimension.TIME), _json_schema(Dimension.TIME)]
"""`5 us` -> seconds."""
Rate: TypeAlias = Annotated[float, _parser(Dimension.RATE), _json_schema(Dimension.RATE)]
"""`312 TFLOP/s` -> operations per second."""
Watts: TypeAlias = Annotated[float, _parser(Dimension.POWER), _json_schema(Dimension.POWER)]
"""`1.2 MW` -> watts."""
HourlyPrice: TypeAlias = Annotated[
    float, _parser(Dimension.HOURLY_PRICE), _json_schema(Dimension.HOURLY_PRICE)
]
"""`2.5 USD/h` -> US dollars per hour."""
TrafficPrice: TypeAlias = Annotated[
    float, _parser(Dimension.TRAFFIC_PRICE), _json_schema(Dimension.TRAFFIC_PRICE)
]
"""`0.02 USD/GB` -> US dollars per byte."""
EnergyPrice: TypeAlias = Annotated[
    float, _parser(Dimension.ENERGY_PRICE), _json_schema(Dimension.ENERGY_PRICE)
]
"""`0.08 USD/kWh` -> US dollars per joule."""

MAX_COUNT = 10**9
"""Largest number of things, width, vocabulary or length."""

Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A number of things, at least one."""
CountOrZero: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of things, maybe none."""
Positive: TypeAlias = Annotated[float, Field(gt=0, lt=math.inf)]
"""A finite number above 0."""
SPOKEN_COUNT = BeforeValidator(
    lambda count: _quantity(lambda: parse_count(count)) if isinstance(count, str) else count
)
"""In the type of a whole number that may be text too, as in `2T`."""


def spoken_count_schema(largest: int) -> WithJsonSchema:
    """The JSON Schema of such a number."""
    whole = {"type": "integer", "minimum": 1, "maximum": largest}
    return WithJsonSchema({"anyOf": [whole, {"type": "string", "pattern": COUNT_PATTERN}]})


NonNegative: TypeAlias = Annotated[float, Field(ge=0, lt=math.inf)]
"""A finite number, at least 0."""
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A part of a whole, from 0 to below 1."""
Ratio: TypeAlias = Annotated[float, Field(ge=1, le=1e6)]
"""How many times one thing is another, at least 1."""
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=100, pattern=NAME_PATTERN)]
"""A word that can stand in a path such as `island/3`."""
NodeName: TypeAlias = Annotated[str, Field(max_length=120, pattern=NODE_PATTERN)]
"""A node as island/number."""


def _describe(schema: dict[str, Any], form: type[Any]) -> None:
    """Add the docstrings of the form's fields and of those that a base class declares.

    pydantic would do the first, and read the sources whenever a form is read.
    """
    for base in form.__mro__[:-1]:
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in pairwise(statements):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            entry = schema.get("properties", {}).get(field.target.id)
            if entry is None or not isinstance(text, ast.Expr):
                continue
            if isinstance(text.value, ast.Constant):
                entry.setdefault("description", inspect.cleandoc(str(text.value.value)))


class SpokenEnum(StrEnum):
    """Words of a file, which are also read by the names that people have for them."""

    @classmethod
    def spoken(cls) -> dict[str, str]:
        """Other names, in small letters, and the word that each stands for."""
        return {}

    @classmethod
    def _missing_(cls, value: object) -> SpokenEnum | None:
        name = str(value)[:40].strip().lower()
        word = cls.spoken().get(name, name)
        return next((each for each in cls if each.value == word), None)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        schema = handler(core)
        handler.resolve_ref_schema(schema)["enum"] = [*cls, *cls.spoken()]
        return schema


class FileForm:
    """Base of dataclasses that a file is read as: unknown keys are faults, docstrings describe."""

    __slots__ = ()
    __pydantic_config__ = {  # noqa: RUF012
        "extra": "forbid",
        "json_schema_extra": _describe,
    }


def value_of(type_: type[T], form: Any, **others: object) -> T:
    """The dataclass `type_` with the form's values of the same names, and `others`.

    Lists become tuples. Where the form has None, the default of `type_` stands.
    """
    names = {field.name for field in fields(form)}
    values: dict[str, Any] = dict(others)
    for field in fields(cast(Any, type_)):
        if field.name in names and field.name not in others:
            value = getattr(form, field.name)
            if value is not None:
                values[field.name] = tuple(value) if isinstance(value, list) else value
    return type_(**values)


_RELATIONS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


@lru_cache(maxsize=256)
def _limits(type_: Any) -> tuple[tuple[str, tuple[tuple[Any, Any], ...], str], ...]:
    """(field, its relations and limits, these in words) of every field whose type has limits."""
    rows = []
    for name, hint in get_type_hints(type_, include_extras=True).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        annotated = next((part for part in parts if get_origin(part) is Annotated), None)
        found = [
            (relation, getattr(limit, key), word)
            for info in get_args(annotated)[1:]
            for limit in getattr(info, "metadata", ())
            for key, (relation, word) in _RELATIONS.items()
            if hasattr(limit, key)
        ]
        if found:
            words = (
                "finite" if limit == math.inf else f"{word} {limit:,}" for _, limit, word in found
            )
            tests = tuple((relation, limit) for relation, limit, _ in found)
            rows.append((name, tests, " and ".join(words)))
    return tuple(rows)


def check_limits(value: object) -> None:
    """Raise an InputError unless every field of a dataclass is within the limits of its type."""
    for name, tests, words in _limits(cast(Hashable, type(value))):
        number = getattr(value, name)
        if number is None:
            continue
        for relation, limit in tests:
            try:
                within = relation(number, limit)  # False also where it is NaN
            except TypeError:
                within = False
            if not within:
                raise InputError(f"{name} is {number!s:.40}; it must be {words}")


def schema_text(form: type[Any], *, schema: str, title: str) -> str:
    """The JSON Schema (draft 2020-12) of files that are read as `form` with this schema number."""
    body = TypeAdapter(form).json_schema(schema_generator=_WithoutTitles)
    name, _, newest = schema.rpartition("/")
    numbers = [f"{name}/{number}" for number in range(1, int(newest) + 1)]
    properties = {
        "schema": {"enum": numbers, "description": "Kind and number of this file's form."},
        **body.get("properties", {}),
    }
    body.update(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": title,
            "properties": properties,
            "required": ["schema", *body.get("required", [])],
        }
    )
    return laid_out(_with_references(body)) + "\n"


def _with_references(body: dict[str, Any]) -> dict[str, Any]:
    """The schema with each kind of quantity said once."""
    quantities = {f"{each.name.title()}Text": _quantity_schema(each) for each in Dimension}
    used: dict[str, Any] = {}

    def shared(value: Any) -> Any:
        if isinstance(value, list):
            return [shared(each) for each in value]
        if not isinstance(value, dict):
            return value
        for name, quantity in quantities.items():
            if value.get("pattern") == quantity["pattern"]:
                used[name] = quantity
                value = {key: part for key, part in value.items() if key not in quantity}
                return {**value, "$ref": f"#/$defs/{name}"}
        return {key: shared(part) for key, part in value.items()}

    body = shared(body)
    return {**body, "$defs": {**body.get("$defs", {}), **used}} if used else body


class _WithoutTitles(GenerateJsonSchema):
    """Keys without titles, which would only repeat them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
