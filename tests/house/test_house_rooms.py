"""The rooms' one-way order, and which room may import which heavy library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hetplan"

# Lower numbers know nothing of higher ones; rooms of one number know nothing of each other,
# except that model, cluster and job describe one question together.
ORDER = {
    "version": 0,
    "errors": 0,
    "units": 1,
    "files": 2,
    "model": 3,
    "cluster": 3,
    "job": 3,
    "profiling": 4,
    "plans": 4,
    "importers": 5,
    "machine": 5,
    "predict": 5,
    "cost": 6,
    "lint": 7,
    "search": 8,
    "advice": 9,
    "emitters": 9,
    "runtime": 9,
    "emulation": 9,
    "launchers": 10,
    "reports": 11,
    "benchmarks": 12,
    "cli": 13,
    "__main__": 14,
    "__init__": 14,
}
INPUT_ROOMS = {"model", "cluster", "job"}
HOMES_OF_HEAVY_LIBRARIES = {
    "torch": {"profiling", "machine", "runtime", "emulation", "launchers"},
    "ortools": {"search"},
    "sklearn": {"predict"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in ORDER, f"{room} is not in the order of rooms: add it to ORDER with its place"
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "hetplan" and len(parts) > 1 and parts[1] in ORDER:
            other = parts[1]
            allowed = (
                other == room
                or ORDER[other] < ORDER[room]
                or (room in INPUT_ROOMS and other in INPUT_ROOMS)
            )
            assert allowed, f"{path.name} of room {room} imports {module}, which lies above it"
        for library, homes in HOMES_OF_HEAVY_LIBRARIES.items():
            assert parts[0] != library or room in homes, f"{library} is not for room {room}"


def test_no_room_is_named_like_a_verb_of_the_library() -> None:
    import hetplan

    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not rooms & set(hetplan.__all__)


def test_every_public_name_can_be_imported() -> None:
    import hetplan

    for name in hetplan.__all__:
        assert getattr(hetplan, name) is not None


def test_help_imports_no_heavy_library() -> None:
    heavy = ("torch", "ortools", "sklearn", "pandas", "scipy", "numpy", "numba", "pydantic")
    code = (
        "import sys\n"
        "sys.argv = ['hetplan', '--help']\n"
        "from hetplan.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_modules_stay_small() -> None:
    too_long = {
        str(path.relative_to(PACKAGE)): lines
        for path in MODULES
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not too_long, f"more than 600 lines, split them: {too_long}"


def test_folders_of_a_room_have_an_order() -> None:
    """No circle: what a folder needs of another one does not need it in turn."""
    needs: dict[str, set[str]] = {}
    folders = {
        ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        for path in MODULES
        if len(path.relative_to(PACKAGE).parts) == 3
    }
    for path in MODULES:
        own = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        if own in folders:
            found = {module for module in imported_modules(path) if module.startswith("hetplan.")}
            others = {".".join(module.split(".")[:3]) for module in found} & folders
            needs.setdefault(own, set()).update(others - {own})
    while needs:
        free = [folder for folder, others in needs.items() if not others & set(needs)]
        assert free, f"these folders need each other in a circle: {needs}"
        for folder in free:
            del needs[folder]
