"""hetplan: profile, predict, plan and launch training on accelerators that do not match.

The verbs are the library: `load_model`, `load_cluster`, `load_job`, `load_plan`, `import_file`,
`fit`, `plan`, `estimate`, `emit`, `compare`. They are imported when first used, so that
`import hetplan` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetplan.errors import (
    HetplanError,
    InfeasibleError,
    InputError,
    LaunchError,
    LimitError,
    ProfileError,
)
from hetplan.version import __version__

if TYPE_CHECKING:
    from hetplan.cluster.load import load_cluster
    from hetplan.comparison.compare import compare
    from hetplan.cost.estimate import estimate
    from hetplan.importers.table import import_file
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model
    from hetplan.predict.fit import fit
    from hetplan.search.files import load_plan
    from hetplan.trainers.emission import emit
    from hetplan.whatif.plan import plan

__all__ = [
    "HetplanError",
    "InfeasibleError",
    "InputError",
    "LaunchError",
    "LimitError",
    "ProfileError",
    "__version__",
    "compare",
    "emit",
    "estimate",
    "fit",
    "import_file",
    "load_cluster",
    "load_job",
    "load_model",
    "load_plan",
    "plan",
]

_HOMES = {
    "compare": "hetplan.comparison.compare",
    "emit": "hetplan.trainers.emission",
    "estimate": "hetplan.cost.estimate",
    "fit": "hetplan.predict.fit",
    "import_file": "hetplan.importers.table",
    "load_cluster": "hetplan.cluster.load",
    "load_job": "hetplan.job.load",
    "load_model": "hetplan.model.load",
    "load_plan": "hetplan.search.files",
    "plan": "hetplan.whatif.plan",
}


def __getattr__(name: str) -> object:
    """The public verb of this name, imported on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hetplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
