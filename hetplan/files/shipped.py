"""Where the examples, the device catalogue and the profiles are, installed or in a checkout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import hetplan
from hetplan.errors import HetplanError


def shipped_folder(name: Literal["configs", "profiles"]) -> Path:
    """The folder of this name that came with hetplan."""
    package = Path(hetplan.__file__).parent
    # In the installed package first: a checkout has no hetplan/shipped.
    for folder in (package / "shipped" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise HetplanError(
        f"the {name} folder that belongs to hetplan is missing beside {package}; install it again"
    )


def default_store() -> Path:
    """The user's own profile store; it need not exist."""
    home = os.environ.get("XDG_DATA_HOME") or ""
    # The XDG specification says that a relative path there is to be ignored.
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "share"
    return base / "hetplan" / "profiles"


def default_stores() -> tuple[Path, ...]:
    """Where measurements are read from unless the user names a place: own store, then shipped.

    What others measured (profiles/kinds) is shipped as laws (`predict.fit.with_shipped`).
    """
    shipped = shipped_folder("profiles")
    own = (default_store(), shipped / "cpu", shipped / "links")
    return tuple(folder for folder in own if folder.is_dir())
