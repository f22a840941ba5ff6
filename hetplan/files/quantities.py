"""Types for the fields of a file form (quantities with units, counts, names), and its JSON Schema.

A field of such a type is text in the file and a float in SI base units after reading.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.errors import InputError
from hetplan.units import EXAMPLES, NAME_PATTERN, Dimension, parse_quantity, pattern

NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+$"
"""A node as island/number."""


def _parser(dimension: Dimension) -> BeforeValidator:
    def parse(text: object) -> float:
        try:
            return parse_quantity(text, dimension)
        except InputError as error:
            # pydantic collects this kind and goes on to the next field.
            raise PydanticCustomError("quantity", "{message}", {"message": str(error)}) from error

    return BeforeValidator(parse)


def _json_schema(dimension: Dimension) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "string",
            "pattern": pattern(dimension),
            "examples": list(EXAMPLES[dimension]),
        }
    )


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

Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
"""A number of things, at least one."""
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A part of a whole, from 0 to below 1."""
Ratio: TypeAlias = Annotated[float, Field(ge=1, le=1e6)]
"""How many times one thing is another, at least 1."""
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=100, pattern=NAME_PATTERN)]
"""A word that can stand in a path such as `island/3`."""
NodeName: TypeAlias = Annotated[str, Field(max_length=120, pattern=NODE_PATTERN)]
"""A node as island/number."""


def schema_text(form: type[Any], *, schema: str, title: str) -> str:
    """The JSON Schema (draft 2020-12) of files that are read as `form` with this schema number."""
    body = TypeAdapter(form).json_schema()
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
    return json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
