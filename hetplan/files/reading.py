"""From a file that somebody wrote to a value, or to the list of everything that is wrong with it.

`read_document` gets text into plain data (YAML, or JSON for `*.json`), `decode` checks the schema
number, the keys, the types and the file's own rules, all at once, and names file, line and field
of every fault.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from types import NoneType, UnionType
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

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hetplan.errors import Fault, InputError
from hetplan.files import nodes
from hetplan.files.encoding import hints_of
from hetplan.files.nodes import Node, field_text
from hetplan.files.quantities import NODE_PATTERN
from hetplan.units import NAME_PATTERN

T = TypeVar("T")

_MAX_FILE_BYTES = 1 << 28  # a plan for 131,072 devices is under 1 MB; 256 MiB is a wrong file


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file that was read: its data, and where in the text each value stands."""

    file: str
    text: str
    root: object
    """Dicts, lists and scalars."""
    sha256: str
    """Hex digest of the file's bytes."""
    tree: Node | None = None

    @cached_property
    def node(self) -> Node:
        """The data with lines."""
        return self.tree if self.tree is not None else nodes.json_nodes(self.text)

    def line(self, path: nodes.Path) -> int:
        """Line of the value at this path, or of its nearest parent that exists."""
        return nodes.line_of(self.node, path)

    def at(self, *path: str | int) -> object:
        """The value at this path; None where there is none."""
        value = self.root
        for step in path:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                return None
        return value

    def whole(self, path: nodes.Path) -> int | None:
        """The whole number of at least one at this path; None where there is none."""
        value = self.at(*path)
        right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return value if right and isinstance(value, int) else None

    def word(self, path: nodes.Path) -> str | None:
        """The text at this path; None where there is none."""
        value = self.at(*path)
        return value if isinstance(value, str) else None

    def entries(self, path: nodes.Path) -> range:
        """Positions of the list at this path; none where it is not a list."""
        value = self.at(*path)
        return range(len(value)) if isinstance(value, list) else range(0)

    def fault(self, path: nodes.Path, message: str) -> Fault:
        """A fault at this place of the file."""
        return Fault(file=self.file, line=self.line(path), field=field_text(path), message=message)


Check: TypeAlias = Callable[[Document], Iterable[Fault]]
"""A rule of a file's own. It sees the raw data, so it must step over what has the wrong type."""


def read_document(path: str | Path | Document) -> Document:
    """The file's data; an InputError where it is missing or not YAML (`*.json`: JSON) in UTF-8.

    A document is returned as it is: it takes the place of a file that nobody wrote.
    """
    return path if isinstance(path, Document) else document_of(str(path), read_bytes(Path(path)))


def document_of(file: str, data: bytes) -> Document:
    """The same of what a file of this name has, or would have."""
    text = text_of(file, data)
    sha256 = hashlib.sha256(data).hexdigest()
    if Path(file).suffix.lower() == ".json":
        root = nodes.read_json(file, text)
        return Document(file=file, text=text, root=root, sha256=sha256)
    tree = nodes.read_yaml(file, text)
    if any(True for _ in nodes.repeated_keys(tree)):
        raise nodes.duplicate_error(file, tree)
    return Document(file=file, text=text, root=nodes.plain(tree), sha256=sha256, tree=tree)


def read_text(path: Path) -> str:
    """The file's text; an InputError where it is missing, empty or not UTF-8."""
    return text_of(str(path), read_bytes(path))


def text_of(file: str, data: bytes) -> str:
    """The bytes as text; an InputError where they are no UTF-8 or only space."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8 text"
        raise InputError(Fault(file=file, line=line, message=message)) from error
    if not text.strip():
        raise InputError(Fault(file=file, message="the file is empty"))
    return text


def read_bytes(path: Path) -> bytes:
    """The file's bytes; an InputError where it is missing, no regular file, or too large."""
    try:
        if path.is_dir():
            raise InputError(Fault(file=str(path), message="is a folder; name a file in it"))
        if not path.exists():
            near = _near_files(path)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise InputError(Fault(file=str(path), message=f"there is no such file{hint}"))
        if not path.is_file():
            raise InputError(Fault(file=str(path), message="is not a regular file; name a file"))
        if path.stat().st_size > _MAX_FILE_BYTES:
            message = f"has {path.stat().st_size} bytes; hetplan reads files of up to 256 MiB"
            raise InputError(Fault(file=str(path), message=message))
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Fault(file=str(path), message=f"cannot be read: {reason}")) from error


def _near_files(path: Path) -> list[str]:
    """Files of the same folder with a name like this one."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return []
    return [str(path.parent / name) for name in get_close_matches(path.name, names, n=2)]


def decode(document: Document, type_: type[T], *, schema: str, checks: Sequence[Check] = ()) -> T:
    """The document as a value of the dataclass `type_`.

    `schema` is `name/number`; a file of this name and any number up to this one is accepted.
    Raises one InputError with every fault that was found.
    """
    root = document.root
    if not isinstance(root, dict):
        found = "a list" if isinstance(root, list) else f"the text {str(root)[:40]!a}"
        message = f"found {found}; write a mapping (`key: value` lines) with `schema: {schema}`"
        raise InputError(document.fault((), message))
    faults = _schema_faults(document, root, schema)
    data = root if _has_field(type_, "schema") else {k: v for k, v in root.items() if k != "schema"}
    data = _newest_form(type_, data)
    places: list[tuple[nodes.Path, type[Any], object]] = []
    faults += _unknown_keys(document, type_, data, (), places)
    value: T | None = None
    try:
        value = _validate(type_, data)
    except ValidationError as error:
        faults += _validation_faults(document, error)
    except InputError as error:
        faults += _constructor_faults(document, places, error)
    except UnicodeEncodeError:
        faults.append(
            document.fault((), "holds half of a surrogate pair (\\ud800 to \\udfff); remove it")
        )
    for check in checks:
        faults += check(document)
    if faults or value is None:
        unique = dict.fromkeys(faults)
        raise InputError(*sorted(unique, key=lambda fault: (fault.line, fault.field)))
    return value


def _newest_form(hint: object, data: Any) -> Any:
    """The data with every nested value that knows an older form of itself in its newest one.

    Such a dataclass has a static method `from_older_form`, from data to data.
    """
    hint = _unwrapped(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(data, dict):
        older = getattr(hint, "from_older_form", None)
        data = data if older is None else older(data)
        hints = hints_of(hint)
        return {
            key: _newest_form(hints[key], value) if key in hints else value
            for key, value in data.items()
        }
    return data


def _has_field(type_: type[Any], name: str) -> bool:
    return any(field.name == name for field in fields(type_))


def _schema_faults(document: Document, root: dict[str, object], schema: str) -> list[Fault]:
    """Faults of the `schema` key; another kind or a newer number is refused at once."""
    name, _, newest = schema.rpartition("/")
    if "schema" not in root:
        if "model_type" in root and name != "hetplan.model":
            message = f"this is a config.json of a model, a {name} file is expected here ({schema})"
            raise InputError(document.fault(("model_type",), message))
        return [document.fault((), f"required key `schema` is missing; add `schema: {schema}`")]
    found = root["schema"]
    parts = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    if not parts[0] or not parts[2].isascii() or not parts[2].isdigit() or int(parts[2][:9]) < 1:
        return [document.fault(("schema",), f"found {str(found)[:60]!a}; write `schema: {schema}`")]
    if parts[0] != name:
        message = f"this is a {parts[0][:60]} file, a {name} file is expected here ({schema})"
        raise InputError(document.fault(("schema",), message))
    if len(parts[2]) > 9 or int(parts[2]) > int(newest):
        message = (
            f"found {str(found)[:60]}, this version of hetplan reads up to {schema}; use a newer "
            "hetplan or write the older form"
        )
        raise InputError(document.fault(("schema",), message))
    return []


@lru_cache(maxsize=256)
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)


def _validate(type_: type[T], data: object) -> T:
    # Strict JSON mode is the strictness that files need: "5" and true are no integers and 1.0 is
    # none either, while lists become tuples and words become enumeration members.
    payload = json.dumps(data, ensure_ascii=False).encode("utf-8")
    adapter: TypeAdapter[T] = _adapter(cast(Hashable, type_))
    value = adapter.validate_json(payload, strict=True)
    return value


def _unknown_keys(
    document: Document,
    hint: object,
    data: object,
    path: nodes.Path,
    places: list[tuple[nodes.Path, type[Any], object]],
) -> list[Fault]:
    """Keys that no field has, at any depth; every nested dataclass is noted in `places`.

    Values of the core carry no pydantic settings, so their unknown keys must be found by this walk.
    """
    faults: list[Fault] = []
    hint = _variant(_unwrapped(hint), data)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(data, dict):
        hints = hints_of(hint)
        places.append((path, hint, data))
        for key, value in data.items():
            if key in hints:
                if isinstance(value, dict | list):
                    faults += _unknown_keys(document, hints[key], value, (*path, key), places)
            else:
                near = get_close_matches(key, hints, n=3, cutoff=0.5)
                known = (
                    f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(hints)}"
                )
                faults.append(document.fault((*path, key), f"unknown key; {known}"))
    elif get_origin(hint) in (tuple, list) and isinstance(data, list):
        arguments = get_args(hint)
        each = get_origin(hint) is list or Ellipsis in arguments
        for position, value in enumerate(data):
            if isinstance(value, dict | list) and (each or position < len(arguments)):
                inner = arguments[0 if each else position]
                faults += _unknown_keys(document, inner, value, (*path, position), places)
    return faults


def _unwrapped(hint: object) -> object:
    """The hint without Annotated and without `| None`."""
    if get_origin(hint) is Annotated:
        return _unwrapped(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        real = [part for part in get_args(hint) if part is not NoneType]
        return _unwrapped(real[0]) if len(real) == 1 else hint
    return hint


def _variant(hint: object, data: object) -> object:
    """Of several dataclasses that a value can be, the one that has most of its keys."""
    if get_origin(hint) not in (Union, UnionType) or not isinstance(data, dict):
        return hint
    shapes = [part for part in get_args(hint) if is_dataclass(part)]
    return max(
        shapes, key=lambda part: len(data.keys() & get_type_hints(part).keys()), default=hint
    )


def _validation_faults(document: Document, error: ValidationError) -> list[Fault]:
    faults = []
    for detail in error.errors(include_url=False):
        if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            continue  # reported, with the nearest known keys, by _unknown_keys
        path = detail["loc"]
        faults.append(document.fault(path, pydantic_message(detail)))
    return faults


def _constructor_faults(
    document: Document, places: list[tuple[nodes.Path, type[Any], object]], error: InputError
) -> list[Fault]:
    """A dataclass refused its own fields; which one is found by building the parts alone."""
    faults: list[Fault] = []
    for path, type_, data in reversed(places):
        if any(field_text(path) == fault.field for fault in faults):
            continue
        try:
            _validate(type_, data)
        except InputError as inner:
            if not any(fault.message in str(inner) for fault in faults):
                faults.append(document.fault(path, str(inner)))
        except (ValidationError, UnicodeEncodeError):
            continue
    return faults or [document.fault((), str(error))]


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
