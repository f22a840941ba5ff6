"""Plan files that were changed, with the seal that they would have."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hetplan.files.encoding import canonical


def write_sealed(path: Path, data: Any) -> None:
    """Write the data of a plan file in the usual form, with its own seal."""
    digest = hashlib.sha256(canonical({**data, "seal": ""}).encode()).hexdigest()
    path.write_text(json.dumps({**data, "seal": digest}, indent=2, sort_keys=True))
