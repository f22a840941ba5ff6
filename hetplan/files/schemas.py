"""JSON Schema of a file form, for editors that complete and check YAML while it is written."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter


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
