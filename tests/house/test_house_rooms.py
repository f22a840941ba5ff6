"""Rooms import one way, files and functions stay small, heavy libraries stay at home."""

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
    "interrupts": 0,
    "units": 1,
    "kernels": 1,
    "deadline": 2,
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
    "search": 7,
    "proof": 8,
    "whatif": 8,
    "schedulers": 8,
    "trainers": 9,
    "advice": 9,
    "lint": 10,
    "drafting": 10,
    "runtime": 9,
    "emulation": 9,
    "launchers": 10,
    "comparison": 11,
    "reports": 12,
    "library": 13,
    "cli": 14,
    "__main__": 15,
    "__init__": 15,
}
INPUT_ROOMS = {"model", "cluster", "job"}
HOMES_OF_HEAVY_LIBRARIES = {
    "torch": {"profiling", "machine", "runtime", "emulation", "launchers"},
    "ortools": {"search"},
    "psutil": {"machine"},
}
OUTER_ROOMS = {"cli", "library", "comparison", "reports", "trainers", "schedulers", "advice",
               "launchers", "emulation", "runtime", "importers", "lint", "machine", "profiling",
               "emitters"}  # fmt: skip
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 600, 60, 8
FILES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
NODES = {
    path: [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.FunctionDef | ast.ClassDef)
    ]
    for path, text in FILES.items()
}
FOR_TYPES = {
    id(child)
    for nodes in NODES.values()
    for node in nodes
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.body
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(path: Path, *, with_types: bool = True) -> set[str]:
    """Every module, or name of one, that is imported anywhere, inside functions too.

    Without types: not what only type checkers read (`if TYPE_CHECKING:`).
    """
    found: set[str] = set()
    for node in NODES[path]:
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        else:
            continue
        if with_types or id(node) not in FOR_TYPES:
            found |= names
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        assert room in ORDER, f"{room} is not in the order of rooms: add it to ORDER"
        for module in sorted(imported_modules(path)):
            parts = module.split(".")
            if parts[0] == "hetplan" and len(parts) > 1 and parts[1] in ORDER:
                other = parts[1]
                together = room in INPUT_ROOMS and other in INPUT_ROOMS
                if not (other == room or ORDER[other] < ORDER[room] or together):
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {module}, which lies above")
            if room not in HOMES_OF_HEAVY_LIBRARIES.get(parts[0], {room}):
                wrong.append(f"{path.relative_to(PACKAGE)}: {parts[0]} is not for this room")
    assert not wrong, "\n".join(wrong)


def circles(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left after everything that needs nothing of the rest is taken away."""
    needs = {name: others & set(needs) - {name} for name, others in needs.items()}
    for _ in range(2):  # first from below, then from above
        while free := {name for name, others in needs.items() if not others}:
            needs = {name: others - free for name, others in needs.items() if name not in free}
        turned: dict[str, set[str]] = {name: set() for name in needs}
        for name, others in needs.items():
            for other in others:
                turned[other].add(name)
        needs = turned
    return needs


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports inside functions count: they hide a circle, they do not open it."""
    modules = {module_of(path) for path in FILES}
    needs = {}
    for path in FILES:
        imported = imported_modules(path, with_types=False) & modules
        packages = {name for name in imported if (PACKAGE.parent / name.replace(".", "/")).is_dir()}
        needs[module_of(path)] = imported - packages
    found = circles(needs)
    assert not found, found


def test_folders_import_each_other_in_no_circle() -> None:
    folders = {module_of(path).rpartition(".")[0] for path in FILES}
    nested = {folder for folder in folders if folder.count(".") == 2}
    needs: dict[str, set[str]] = {folder: set() for folder in nested}
    for path in FILES:
        folder = module_of(path).rpartition(".")[0]
        if folder in nested:
            needs[folder] |= {".".join(module.split(".")[:3]) for module in imported_modules(path)}
    found = circles(needs)
    assert not found, found


def is_command(node: ast.FunctionDef) -> bool:
    """Whether typer reads the arguments as options."""
    text = ast.unparse(node.args)
    return "typer." in text or "AsJson" in text or "Annotated[" in text


# Shorten these, and add no others.
TOO_LONG = {
    "cli/profile.py:_shapes",
    "launchers/run_log.py:run_of",
    "runtime/passes.py:__init__",
}


def test_files_stay_small() -> None:
    lines = {str(path.relative_to(PACKAGE)): text.count("\n") for path, text in FILES.items()}
    too_long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert not too_long, f"more than {MAX_FILE_LINES} lines, split them: {too_long}"


def test_functions_of_outer_rooms_stay_small() -> None:
    """At most 60 lines and 8 arguments, but for commands, whose arguments are options."""
    found = {}
    for path, nodes in NODES.items():
        if room_of(path) not in OUTER_ROOMS:
            continue
        for node in nodes:
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            count = len(node.args.args) + len(node.args.kwonlyargs)
            if (lines > MAX_FUNCTION_LINES or count > MAX_ARGUMENTS) and not is_command(node):
                place = f"{path.relative_to(PACKAGE)}:{node.name}"
                found[place] = f"{lines} lines, {count} arguments"
    new = {place: size for place, size in found.items() if place not in TOO_LONG}
    assert not new, new


def test_no_room_is_named_like_a_verb_of_the_library() -> None:
    import hetplan

    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not rooms & set(hetplan.__all__)


def test_every_public_name_is_defined_where_it_is_looked_up() -> None:
    import hetplan

    for name, module in hetplan._HOMES.items():
        path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
        assert any(
            isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name for n in NODES[path]
        ), name
    assert set(hetplan.__all__) >= set(hetplan._HOMES)


def test_help_imports_no_heavy_library() -> None:
    heavy = ("torch", "ortools", "psutil", "pandas", "scipy", "numpy", "numba", "pydantic", "rich")
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


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from hetplan.cli.main import main
main()
"""


@pytest.mark.slow  # imports the search: 4 s of CPU
def test_planning_needs_no_torch(tmp_path: Path) -> None:
    configs = PACKAGE.parent / "configs"
    out = tmp_path / "plan.json"
    inputs = (
        *("--model", configs / "models" / "gpt-tiny.yaml"),
        *("--cluster", configs / "clusters" / "this-machine.yaml"),
        *("--job", configs / "jobs" / "gpt-tiny.yaml"),
    )

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)

    plan = ("plan", *inputs, "--target", "megatron", "--gap", "0.3", "--no-native")
    planned = run(*plan, "--out", out)
    assert planned.returncode == 0, planned.stderr
    assert out.exists()
    launched = run("launch", out)
    assert launched.returncode == 1
    assert "pip install 'hetplan[torch]'" in launched.stderr


def test_no_command_shows_more_than_15_options() -> None:
    from hetplan.cli.main import ENTRIES, load_command

    commands = {entry.name: load_command(entry.name) for entry in ENTRIES}
    while groups := {k: v for k, v in commands.items() if hasattr(v, "commands")}:
        for name, group in groups.items():
            del commands[name]
            commands |= {f"{name} {sub}": command for sub, command in group.commands.items()}
    shown = {
        name: sum(param.param_type_name == "option" and not param.hidden for param in one.params)
        for name, one in commands.items()
    }
    assert not {name for name, count in shown.items() if count > 15}, shown
