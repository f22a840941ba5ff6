"""Functions that numba compiles ("kernels"), without waiting for the compiler on small questions.

Compiling all kernels takes a minute or two; a small question runs in Python faster than numba is
imported. So a kernel runs in Python first and counts its loops. When it has used up its allowance
the arrays that it was given get their old values back, it is compiled, and it runs compiled from
then on. Both ways give the same result to the last bit. How much is allowed goes by counts, never
by a clock.

Compiled kernels are kept on disk (`~/.cache/hetplan/kernels`) under a hash of all that goes into
them: their own code, the kernels that they call, the constants that they read. So an edit of a
callee is noticed, and all processes and copies of hetplan on a machine share what one compiles.

What a kernel may do: take numbers, arrays, and tuples of them by position; change arrays that it
was given; call other kernels, `math` and simple numpy functions. Not `array.sum()` of floats or
`np.sort`: numpy adds and sorts in another order than numba (use `sum_of` and `order_of`).
"""

from __future__ import annotations

import ast
import errno
import functools
import hashlib
import logging
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from hetplan.interrupts import held

_P = ParamSpec("_P")
_R = TypeVar("_R")

MAX_INTERPRETED = 1_000_000
"""Loops and calls that a kernel may take in Python before it is compiled: about half a second."""

MAX_INTERPRETED_CACHED = 200_000
"""The same where the compiled kernel is on disk already and only has to be loaded, which takes
three times as long with numba's import. Where numba was imported for another kernel: none."""

_COPIED_PER_LOOP = 1_000
"""Array elements that are copied in the time of one loop in Python."""

_KEPT_VERSIONS = 4
"""Versions of one kernel that stay on disk, the newest: those of a few copies of hetplan."""

_logger = logging.getLogger(__name__)


class _TooLongError(Exception):
    """A kernel used up its allowance while it ran in Python."""


class _Counter:
    """Counts down the loops and calls of the kernel that runs in Python."""

    __slots__ = ("at_once", "left")

    def __init__(self) -> None:
        self.left = 0
        self.at_once = False

    def count(self) -> None:
        """One more loop or call; raises when the allowance is used up."""
        self.left -= 1
        if self.left < 0:
            raise _TooLongError


_counter = _Counter()


class Kernel(Generic[_P, _R]):
    """A function that runs in Python until it has run for long, and compiled from then on."""

    def __init__(self, function: Callable[_P, _R]) -> None:
        assert isinstance(function, FunctionType)
        functools.update_wrapper(self, function)
        self.function: FunctionType = function
        self._compiled: Callable[..., _R] | None = None
        self._left = -1
        self._started = False
        self._on_disk = False
        """Some version of the kernel as it is now has been compiled on this machine."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run it, one way or the other."""
        if self._compiled is None:
            return self._interpret(*args, **kwargs)
        with held:
            return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _kernel_named, (self.function.__module__, self.function.__qualname__)

    @functools.cached_property
    def interpreted(self) -> Callable[..., Any]:
        """The function in Python, with a count in every loop; the kernels that it calls likewise.

        OSError or LookupError where there is no source.
        """
        definition = _definitions(self.function.__code__.co_filename)[self.function.__name__]
        definition.decorator_list, definition.returns = [], None
        for node in ast.walk(definition):
            if isinstance(node, ast.arg):
                node.annotation = None
            if isinstance(node, ast.For | ast.While) or node is definition:
                call = ast.Expr(ast.Call(ast.Name("_count_one", ast.Load()), [], []))
                node.body.insert(0, ast.copy_location(call, node.body[0]))
                ast.fix_missing_locations(call)
        tree = ast.Module(body=[definition], type_ignores=[])
        names: dict[str, Any] = {"_count_one": _counter.count}
        for name, value in self._globals():
            names[name] = value.interpreted if isinstance(value, Kernel) else value
        exec(compile(tree, self.function.__code__.co_filename, "exec", dont_inherit=True), names)
        counted: Callable[..., Any] = names[definition.name]
        return counted

    @functools.cached_property
    def elementwise(self) -> Callable[..., Any]:
        """The function in Python where rows of arrays take the place of numbers.

        For kernels that branch on counts only, and take the larger of two numbers by `max`.
        """
        names: dict[str, Any] = {"max": np.maximum}
        for name, value in self._globals():
            names[name] = value.elementwise if isinstance(value, Kernel) else value
        return FunctionType(self.function.__code__, names)

    def _globals(self) -> Iterator[tuple[str, Any]]:
        return _globals_of(self.function.__code__, self.function.__globals__)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """What numba compiles, and calls from other kernels."""
        return _compiler().dispatcher(self)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that goes into the compiled kernel, apart from the types of its arguments."""
        code = self.function.__code__
        digest = hashlib.sha256("".join((_versions(), *_written(code))).encode())
        for name, value in sorted(self._globals(), key=lambda g: g[0]):
            if isinstance(value, Kernel):
                digest.update(f"{name} {value.fingerprint}\n".encode())
            elif isinstance(value, np.ndarray):
                digest.update(f"{name} {value.dtype} {value.tolist()}\n".encode())
            elif isinstance(value, bool | int | float | str | tuple | np.generic):
                digest.update(f"{name} {value!r}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def name(self) -> str:
        """Module and function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def compile(self) -> Callable[..., _R]:
        """Run compiled from now on."""
        dispatcher: Callable[..., _R] = self.dispatcher
        self._compiled = dispatcher
        return dispatcher

    def _compile_and_run(self, *args: Any, **kwargs: Any) -> _R:
        compiled = self.compile()
        with held:
            return compiled(*args, **kwargs)

    def _interpret(self, *args: Any, **kwargs: Any) -> _R:
        """Run in Python; compiled where that takes too long."""
        if not self._started:
            self._started, self._left = True, self._allowance()
        if self._left < 0 or _counter.at_once or (self._on_disk and compiler_is_loaded()):
            return self._compile_and_run(*args, **kwargs)
        _counter.left = self._left
        before = []
        for array in _arrays((*args, *kwargs.values())):
            if array.flags.writeable:
                _counter.left -= array.size // _COPIED_PER_LOOP
                before.append((array, array.copy()))
        try:
            with np.errstate(all="ignore"):  # compiled code does not warn either
                result: _R = _plain(self.interpreted(*args, **kwargs))
        except _TooLongError:
            for array, values in before:
                array[...] = values
            return self._compile_and_run(*args, **kwargs)
        self._left = _counter.left
        return result

    def _allowance(self) -> int:
        """Loops that it may take in Python; -1 to compile it at once."""
        self._on_disk = any(kernel_folder().glob(f"{self.name}-*-{self.fingerprint}.kernel"))
        if self._on_disk and compiler_is_loaded():
            return -1
        try:
            _ = self.interpreted
        except (OSError, LookupError):  # no source
            return -1
        return MAX_INTERPRETED_CACHED if self._on_disk else MAX_INTERPRETED


def compiler_is_loaded() -> bool:
    """Whether numba was imported for a kernel, so that another one is compiled or loaded soon."""
    return bool(_compiler.cache_info().currsize)


def kernel(function: Callable[_P, _R]) -> Kernel[_P, _R]:
    """Decorate a function to be compiled when it is used much."""
    return Kernel(function)


@kernel
def sum_of(values: npt.NDArray[np.float64]) -> float:
    """Sum of a row from the first to the last."""
    found = 0.0
    for value in values:
        found += value
    return found


@kernel
def order_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Places of the values from the least to the largest; equal ones keep their order."""
    order = np.arange(values.shape[0])
    for at in range(1, values.shape[0]):
        place, to = order[at], at
        while to > 0 and values[order[to - 1]] > values[place]:
            order[to] = order[to - 1]
            to -= 1
        order[to] = place
    return order


def compile_at_once() -> None:
    """Let no kernel of this process run in Python from now on: for who measures compiled code."""
    _counter.at_once = True


def count_cpu_seconds() -> None:
    """Let `clock` count this process's CPU seconds from now on: for who measures on a machine that
    others use.
    """
    loading.now = time.process_time


def clock() -> float:
    """Seconds of a clock that stands still while kernels and libraries are loaded or compiled."""
    return loading.now() - loading.seconds


def kernel_folder() -> Path:
    """Where compiled kernels are kept."""
    for variable, below in (("NUMBA_CACHE_DIR", "hetplan"), ("XDG_CACHE_HOME", "hetplan/kernels")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / below
    return Path("~/.cache/hetplan/kernels").expanduser()


class _Loading:
    """What takes its time once in a process, whatever is asked: imports, kernels compiled or read.

    Entered while that happens, also within itself.
    """

    __slots__ = ("_before", "_depth", "_since", "now")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self._before, self._depth, self._since = 0.0, 0, 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = self.now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._before += self.now() - self._since

    @property
    def seconds(self) -> float:
        """So far."""
        return self._before + (self.now() - self._since if self._depth else 0.0)


loading = _Loading()


class _Disk:
    """The compiled versions of one kernel on disk; numba asks it before it compiles.

    One file per kernel and types of arguments, written at once: processes may write the same file.
    A folder that cannot be written means that every process compiles for itself.
    """

    cache_path = ""

    def __init__(self, kernel: Kernel[..., Any]) -> None:
        self._kernel = kernel

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel for these types; None if there is none."""
        from numba.core.compiler import CompileResult

        result: Any = CompileResult
        with loading:
            target_context.refresh()
            path = self._path(signature, target_context.codegen())
            try:
                return result._rebuild(target_context, *pickle.loads(_own_bytes(path)))
            except Exception:  # missing, cut off, of another version, or somebody else's
                return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a compiled kernel."""
        from numba.core import serialize

        numba_pickle: Any = serialize
        if compiled.library.has_dynamic_globals:
            return
        path = self._path(signature, compiled.library.codegen)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, written = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(numba_pickle.dumps(compiled._reduce()))
                os.replace(written, path)
            except BaseException:
                os.unlink(written)
                raise
            self._sweep(path)

    def flush(self) -> None:
        """Numba's own request to forget; nothing is forgotten."""

    def _path(self, signature: Any, codegen: Any) -> Path:
        key = hashlib.sha256(f"{signature} {codegen.magic_tuple()}".encode()).hexdigest()[:16]
        kernel = self._kernel
        return kernel_folder() / f"{kernel.name}-{key}-{kernel.fingerprint}.kernel"

    def _sweep(self, newest: Path) -> None:
        """Remove the oldest versions of a kernel for the same types."""
        stem = newest.name.rpartition("-")[0]
        versions = sorted(newest.parent.glob(f"{stem}-*.kernel"), key=lambda p: p.stat().st_mtime)
        # Nobody writes a kernel for an hour: a process that was killed left it.
        left = [p for p in newest.parent.glob(".new-*") if p.stat().st_mtime < time.time() - 3600]
        for path in (*versions[:-_KEPT_VERSIONS], *left):
            path.unlink(missing_ok=True)


def _own_bytes(path: Path) -> bytes:
    """Of a file that nobody else could have written: whatever it says is done."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "others may write to it", str(path))
        return file.read()


class _Compiler:
    """Numba, set up for kernels: imported when the first kernel has to be compiled or loaded."""

    def __init__(self) -> None:
        with loading:
            from numba.core import event, types
            from numba.extending import typeof_impl

        events: Any = event

        class Listener(event.Listener):
            def on_start(_, what: Any) -> None:  # noqa: N805
                self._begin()

            def on_end(_, what: Any) -> None:  # noqa: N805
                self._end()

        self._told = False
        events.register("numba:compile", Listener())

        @typeof_impl.register(Kernel)
        def type_of_kernel(kernel: Kernel[..., Any], _: Any) -> Any:
            return types.Dispatcher(kernel.dispatcher)

    def dispatcher(self, kernel: Kernel[..., Any]) -> Any:
        """Numba's form of a kernel, with hetplan's cache."""
        from numba import njit

        made = njit(**_FLAGS)(kernel.function)
        made._cache = _Disk(kernel)
        return made

    def _begin(self) -> None:
        """A function begins to be compiled, maybe within another one."""
        if not self._told:
            self._told = True
            _logger.warning("compiling kernels, once per machine: up to two minutes ...")
        loading.__enter__()

    def _end(self) -> None:
        loading.__exit__()


_FLAGS: dict[str, Any] = {}
"""Of numba.njit."""


@functools.cache
def _compiler() -> _Compiler:
    return _Compiler()


@functools.cache
def _versions() -> str:
    """Of all that compiles."""
    from importlib.metadata import version

    libraries = (f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy"))
    return f"{sys.version_info[:2]} {', '.join(libraries)} {_FLAGS}"


def _kernel_named(module: str, name: str) -> Any:
    """The kernel of a module, in another process."""
    import importlib

    return getattr(importlib.import_module(module), name)


@functools.cache
def _definitions(path: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _globals_of(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The module's names that a function's code uses, with their values."""
    for name in code.co_names:
        if name in scope:
            yield name, scope[name]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant, scope)


def _written(code: CodeType) -> Iterator[str]:
    """A function's code as text, without the places of files and lines."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_argcount}\n"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _written(constant)
        else:
            yield f"{constant!r}\n"


def _arrays(values: tuple[Any, ...]) -> Iterator[npt.NDArray[Any]]:
    """All arrays among values and in tuples of them."""
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, tuple):
            yield from _arrays(value)


def _plain(value: Any) -> Any:
    """A result with Python's numbers, as compiled code returns it."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, tuple):  # with names
        return type(value)(*map(_plain, value))
    return value
