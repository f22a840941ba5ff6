"""Types for the fields of a file form: quantities with units, counts and names.

A field of such a type is text in the file and a float in SI base units after reading.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.errors import InputError
from hetplan.files.name_patterns import NAME_PATTERN, NODE_PATTERN
from hetplan.units import EXAMPLES, Dimension, parse_quantity, pattern


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
