"""What pydantic found wrong, in the words of somebody who writes the file."""

from __future__ import annotations

from difflib import get_close_matches

from pydantic_core import ErrorDetails

from hetplan.files.name_patterns import NAME_PATTERN, NODE_PATTERN

_WANTED = {
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "int_parsing": "write a whole number",
    "float_type": "write a number",
    "float_parsing": "write a number",
    "finite_number": "write a number that is not infinite",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "list_type": "write a list",
    "tuple_type": "write a list",
}


_PATTERNS = {
    NAME_PATTERN: "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
    NODE_PATTERN: "write island/number, such as a100/17",
}


def describe(value: object) -> str:
    """What was found, short enough for one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return f"the text {value[:60]!a}"
    return str(value)[:60]


def pydantic_message(detail: ErrorDetails) -> str:
    """What was found and what to do, for one error of a ValidationError."""
    kind, found = detail["type"], describe(detail["input"])
    context = detail.get("ctx", {})
    if kind == "missing":
        return "this required key is missing; add it"
    if kind in _WANTED:
        return f"found {found}; {_WANTED[kind]}"
    if kind == "string_type":
        quoted = f', in quotes if it looks like a number: "{detail["input"]}"'
        scalar = isinstance(detail["input"], int | float)
        return f"found {found}; write a text{quoted if scalar else ''}"
    if kind in ("enum", "literal_error"):
        return _one_of(detail["input"], str(context.get("expected", "")), found)
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"found {found}; write a mapping (`key: value` lines)"
    if kind == "greater_than_equal":
        return f"found {found}; it must be at least {context['ge']}"
    if kind == "greater_than":
        return f"found {found}; it must be more than {context['gt']}"
    if kind == "less_than_equal":
        return f"found {found}; it must be at most {context['le']}"
    if kind == "less_than":
        return f"found {found}; it must be less than {context['lt']}"
    if kind in ("too_short", "too_long"):
        least = context.get("min_length")
        wanted = f"at least {least}" if least is not None else f"at most {context['max_length']}"
        return f"found {context['actual_length']} entries; {wanted} needed"
    if kind == "string_pattern_mismatch":
        return f"found {found}; {_PATTERNS.get(context['pattern'], 'it must match the pattern')}"
    if kind == "string_too_short":
        return "found an empty text; write a name"
    # Messages of hetplan's own validators (quantities) say what was found and what to do.
    return detail["msg"] if kind == "quantity" else f"found {found}; {detail['msg']}"


def _one_of(value: object, expected: str, found: str) -> str:
    known = [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(",")]
    near = get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"found {found}; write one of {', '.join(known)}{hint}"
