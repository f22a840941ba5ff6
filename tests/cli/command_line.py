"""Running the command line in this process."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from hetplan.cli.main import app


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Outcome:
    result = CliRunner().invoke(app, arguments)
    return Outcome(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)
