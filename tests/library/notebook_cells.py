"""Runs the code cells of a notebook in order, as Jupyter would, and keeps what they show.

`python tests/library/notebook_cells.py` writes the outputs of docs/my-cluster.ipynb anew. They stay
in the file, because a reader on a web page sees them and cannot run it; predictions are the same on
every machine, and a test compares them. The other notebook measures, so it has none.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import hetplan

DOCS = Path(__file__).resolve().parents[2] / "docs"
WITH_OUTPUTS = DOCS / "my-cluster.ipynb"

Output = dict[str, Any]


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Every code cell, as it lies in the file."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_cells(path: Path) -> list[list[Output]]:
    """What each code cell shows, run in this process and in the current folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run("".join(cell["source"]), names) for cell in code_cells(path)]


def _run(source: str, names: dict[str, Any]) -> list[Output]:
    """A last expression is shown, everything else is printed or not."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed)})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if isinstance(value, hetplan.Result):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str | io.StringIO) -> list[str]:
    whole = text if isinstance(text, str) else text.getvalue()
    return whole.splitlines(keepends=True)


def text_of(outputs: list[list[Output]]) -> list[str]:
    """All lines that are text, of outputs as they are stored or as they were made."""
    parts = (each.get("text") or each["data"]["text/plain"] for cell in outputs for each in cell)
    return [line for part in parts for line in "".join(part).splitlines()]


def main() -> None:
    """Write the outputs anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_DATA_HOME"] = folder  # no profiles of the writer's own
        outputs = run_cells(WITH_OUTPUTS)
    document = json.loads(WITH_OUTPUTS.read_text(encoding="utf-8"))
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    for number, (cell, shown) in enumerate(zip(cells, outputs, strict=True), start=1):
        for each in shown:
            if each["output_type"] == "execute_result":
                each["execution_count"] = number
        cell |= {"execution_count": number, "outputs": shown}
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)
    WITH_OUTPUTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
