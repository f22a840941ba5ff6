"""How one file carries the modules it needs and runs them on an old Python (3.8 and later).

This text stands at the top of every campaign script, before the modules' own sources. The modules
are written for a newer Python; what they use of it is small (data classes with keywords only,
text enumerations, `pairwise`, `zip(strict=)`), and is given to them here, to all versions of
Python alike, so that what was tested on one is what runs on another. Standard library only.
"""

# ruff: noqa: B905, D403, N807, RUF063, UP032, UP036, UP042 (Python 3.8 has none of what these ask for)
import builtins
import collections.abc
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import itertools
import math
import sys
import typing
from typing import Any

_REQUIRED = object()


class TextEnum(str, enum.Enum):
    """enum.StrEnum of Python 3.11."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


def keyword_dataclass(cls: Any = None, **options: Any) -> Any:
    """dataclasses.dataclass with `kw_only` and `slots` of Python 3.10 (slots are ignored)."""
    options.pop("slots", None)
    keywords_only = options.pop("kw_only", False)

    def wrap(cls: Any) -> Any:
        required = []
        for name in cls.__dict__.get("__annotations__", {}) if keywords_only else ():
            if name not in cls.__dict__:
                # A field without a default may follow one that has a default.
                setattr(cls, name, dataclasses.field(default=_REQUIRED))
                required.append(name)
        made = dataclasses.dataclass(**options)(cls)
        if keywords_only:
            plain = made.__init__

            def __init__(self: Any, **values: Any) -> None:
                missing = [name for name in required if name not in values]
                if missing:
                    raise TypeError("{} needs {}".format(cls.__name__, ", ".join(missing)))
                plain(self, **values)

            made.__init__ = __init__
            for name in required:
                delattr(made, name)
        return made

    return wrap if cls is None else wrap(cls)


def pairwise(values: Any) -> Any:
    """itertools.pairwise of Python 3.10."""
    first, second = itertools.tee(values)
    next(second, None)
    return zip(first, second)


def zip_strictly(*values: Any, strict: bool = False) -> Any:
    """zip of Python 3.10, which refuses lengths that differ."""
    if not strict:
        return zip(*values)
    lists = [list(each) for each in values]
    if len({len(each) for each in lists}) > 1:
        raise ValueError("zip() arguments have different lengths")
    return zip(*lists)


def lcm(*values: int) -> int:
    """math.lcm of Python 3.9."""
    result = 1
    for value in values:
        result = abs(result * value) // math.gcd(result, value) if value else 0
    return result


class _Stand:
    """A module of the standard library with some names of a newer Python."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_STANDS = {
    "dataclasses": _Stand(dataclasses, dataclass=keyword_dataclass),
    "enum": _Stand(enum, StrEnum=TextEnum),
    "itertools": _Stand(itertools, pairwise=pairwise),
    "math": _Stand(math, lcm=lcm),
    "typing": _Stand(typing, TypeAlias=typing.Any),
    # typing's own can be subscripted in Python 3.8.
    "collections.abc": _Stand(
        collections.abc,
        **{
            name: getattr(typing, name) for name in collections.abc.__all__ if hasattr(typing, name)
        },
    ),
}


def _import(
    name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0
) -> Any:
    if level == 0 and name in _STANDS and (names or "." not in name):
        return _STANDS[name]
    return builtins.__import__(name, namespace, local, names, level)


class Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that this file carries, before any that are installed."""

    def __init__(self, sources: typing.Dict[str, str]) -> None:  # noqa: UP006
        self.sources = dict(sources)
        self.packages = {name.rpartition(".")[0] for name in self.sources}
        self.packages |= {name.partition(".")[0] for name in self.sources}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module, where it is one of those carried."""
        if fullname not in self.sources and fullname not in self.packages:
            return None
        is_package = fullname in self.packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: Any) -> None:
        """As Python makes modules."""
        return None

    def exec_module(self, module: Any) -> None:
        """Run the module's source, with the names above."""
        name = module.__name__
        given = dict(vars(builtins), __import__=_import, zip=zip_strictly)
        vars(module)["__builtins__"] = given
        text = self.sources.get(name, "")
        exec(compile(text, "<" + name + ">", "exec", dont_inherit=True), vars(module))

    def get_source(self, fullname: str) -> str:
        """For tracebacks."""
        return self.sources.get(fullname, "")


def lacking() -> str:
    """What this Python lacks for measuring, and what to do; empty where it lacks nothing."""
    lacks = ""
    if sys.version_info < (3, 8):
        lacks = "is {}.{}".format(*sys.version_info[:2])
    else:
        try:
            import torch

            parts = [part for part in torch.__version__.split(".")[:2] if part.isdigit()]
            if [int(part) for part in parts] < [2, 1]:
                lacks = "has torch {}".format(torch.__version__)
        except (ImportError, OSError) as error:
            lacks = "has no torch that works: {}".format(error)
    if not lacks:
        return ""
    return "this Python ({}) {}; run this inside the vendor's image, with its Python".format(
        sys.executable, lacks
    )


def carry(sources: typing.Dict[str, str]) -> None:  # noqa: UP006
    """Let the modules of these sources be imported."""
    for name in list(sys.modules):
        if name.partition(".")[0] in {each.partition(".")[0] for each in sources}:
            del sys.modules[name]
    sys.meta_path.insert(0, Carried(sources))
