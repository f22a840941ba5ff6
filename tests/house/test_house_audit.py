"""What `make audit` makes of its tools' answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import audit
import pytest

GOOD = {"name": "good", "version": "1", "vulns": []}
BAD = {
    "name": "bad",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": [], "description": ""}],
}
UNKNOWN = {"name": "unknown", "skip_reason": "not found on PyPI"}


def _told(monkeypatch: pytest.MonkeyPatch, text: str, errors: str = "", code: int = 0) -> None:
    done = subprocess.CompletedProcess[str]((), code, text, errors)
    monkeypatch.setattr(audit, "run", lambda *_: done)


@pytest.mark.parametrize(
    ("packages", "bad", "says"),
    [
        ([GOOD], False, "0 in 1 packages"),
        ([GOOD, BAD], True, "bad 2: PYSEC-1, mended in 3"),
        ([GOOD, UNKNOWN], False, "SKIPPED for 1 of 2 packages"),
        ([UNKNOWN], False, "SKIPPED for 1 of 1 packages"),
    ],
)
def test_vulnerabilities_and_what_nobody_knows(
    packages: list[Any], bad: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _told(monkeypatch, json.dumps({"dependencies": packages, "fixes": []}))
    lines = list(audit.vulnerabilities(Path("pip-audit")))
    assert any(is_bad for is_bad, _ in lines) == bad
    assert any(says in words for _, words in lines)


def test_without_network_it_is_skipped_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, "", "Traceback\nConnectionError: no name", 1)
    ((is_bad, words),) = audit.vulnerabilities(Path("pip-audit"))
    assert not is_bad
    assert "SKIPPED, pip-audit could not ask (ConnectionError: no name)" in words


def test_a_secret_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"filename": "a.py", "line_number": 3, "type": "AWS Access Key"}
    _told(monkeypatch, json.dumps({"results": {"a.py": [found]}}))
    lines = list(audit.secrets(Path("detect-secrets")))
    assert (True, "  a.py:3: AWS Access Key") in lines
    _told(monkeypatch, "", "no git", 1)
    ((is_bad, _),) = audit.secrets(Path("detect-secrets"))
    assert is_bad
