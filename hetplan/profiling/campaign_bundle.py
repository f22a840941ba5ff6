"""One file of Python that measures like hetplan does: its own modules, carried as text.

The modules are hetplan's, unchanged, found by following imports from the runner; so what is
measured in a vendor's image is what hetplan measures. Nothing but the standard library and torch
may be imported, which is checked while the file is made, and every module must run on Python 3.8,
which hetplan's tests ask of `old_python_faults`. Names for types that are made when a module is
imported (`Shape = tuple[...]`) are the one thing that is replaced: Python 3.8 cannot make them,
and nothing uses them at run time.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

from hetplan.errors import HetplanError

RUNNER = "hetplan.profiling.campaign_runner"
OLDEST_PYTHON = (3, 8)
_LOADER = "hetplan.profiling.campaign_loader"
_GENERIC = {"tuple", "list", "dict", "set", "frozenset", "type"}
# Methods and functions that Python 3.8 does not have and the loader does not give.
_TOO_NEW = {"removeprefix", "removesuffix", "bit_count", "UTC", "cache"}


def carried_sources(entry: str = RUNNER) -> tuple[tuple[str, str], ...]:
    """(name, source) of the entry module and every hetplan module it imports, sorted by name."""
    found: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = source(name)
        tree = ast.parse(text)
        found[name] = _without_type_names(name, text, tree)
        for imported in imported_modules(tree):
            root = imported.partition(".")[0]
            if root == "hetplan":
                waiting.append(imported)
            elif root != "torch" and root not in sys.stdlib_module_names:
                raise HetplanError(f"{name} imports {imported}; a campaign script has only torch")
    return tuple(sorted(found.items()))


def script_text(*, docstring: str, sources: tuple[tuple[str, str], ...], work: str) -> str:
    """The whole script: loader, modules, and `work` as the last lines."""
    parts = [f"#!/usr/bin/env python3\n{docstring}\n", source(_LOADER), "\nSOURCES = {}\n"]
    for name, text in sources:
        quoted = repr(text) if "'''" in text or text.endswith("\\") else f"r'''{text}'''"
        parts.append(f"\n# {'-' * 8} {name} {'-' * 8}\nSOURCES[{name!r}] = {quoted}\n")
    return "".join(parts) + f"\n{work}"


def source(name: str) -> str:
    """The text of a module of hetplan."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise HetplanError(f"{name} is missing; install hetplan again")
    return Path(spec.origin).read_text(encoding="utf-8")


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Modules that importing this one imports; those inside functions and for types are not."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = node.module.partition(".")[0] == "hetplan" and _is_module(inner)
                yield inner if is_module else node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [*node.body, *node.orelse, *node.finalbody]


def as_source(value: object, imports: set[tuple[str, str]]) -> str:
    """A Python expression that makes the value again; `imports` gets (module, name) pairs."""
    if isinstance(value, Enum):
        imports.add((type(value).__module__, type(value).__name__))
        return f"{type(value).__name__}({value.value!r})"
    if is_dataclass(value) and not isinstance(value, type):
        imports.add((type(value).__module__, type(value).__name__))
        parts = ", ".join(
            f"{field.name}={as_source(getattr(value, field.name), imports)}"
            for field in fields(value)
            if field.init
        )
        return f"{type(value).__name__}({parts})"
    if isinstance(value, tuple):
        inner = ", ".join(as_source(each, imports) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    raise HetplanError(f"a {type(value).__name__} cannot be carried in a campaign script")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _without_type_names(name: str, text: str, tree: ast.Module) -> str:
    """The text with module-level `Name = tuple[...]` made `Name = object`."""
    lines = text.splitlines(keepends=True)
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or not (_is_type_form(value)):
            continue
        if value.lineno != value.end_lineno:
            raise HetplanError(f"{name}:{value.lineno}: a type's name must stand on one line")
        raw = lines[value.lineno - 1].encode("utf-8")
        cut = raw[: value.col_offset] + b"object" + raw[value.end_col_offset :]
        lines[value.lineno - 1] = cut.decode("utf-8")
    return "".join(lines)


def _is_type_form(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id in _GENERIC | {"Callable", "Sequence", "Iterable", "Mapping"}
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def old_python_faults(name: str, text: str) -> tuple[str, ...]:
    """What the module does at run time that Python 3.8 cannot; hetplan's tests want none."""
    tree = ast.parse(text, feature_version=OLDEST_PYTHON)
    lazy = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    annotated = (ast.AnnAssign, ast.FunctionDef)
    faults = []
    if not lazy and any(isinstance(node, annotated) for node in ast.walk(tree)):
        faults.append(f"{name} needs `from __future__ import annotations`")
    for node in _run_time_nodes(tree):
        if wrong := _too_new(node):
            faults.append(f"{name}:{getattr(node, 'lineno', 0)}: {wrong}")
    return tuple(faults)


def _too_new(node: ast.AST) -> str:
    """What of a newer Python the node is; empty where it is nothing of that kind."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return f"{node.value.id}[...]" if node.value.id in _GENERIC else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        united = any(isinstance(each, ast.BinOp) for each in node.args)
        is_check = node.func.id in ("isinstance", "issubclass")
        return "isinstance with a union" if is_check and united else ""
    if isinstance(node, ast.Attribute) and node.attr in _TOO_NEW:
        return node.attr
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.BitOr):
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
        return "dict | dict" if any(map(_is_dict, sides)) else ""
    return ""


def _is_dict(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "dict"
    return isinstance(node, ast.Dict | ast.DictComp)


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of annotations, which are never evaluated."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield child
                yield from _run_time_nodes(child)
