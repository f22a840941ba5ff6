"""hetplan: profile, predict, plan and launch training on accelerators that do not match.

    model = hetplan.load_model("config.json")
    cluster = hetplan.Cluster.from_nodes("4x8 h100 @A", "8x8 mi300x @B", between="A B 10Gbit 30ms")
    job = hetplan.make_job(global_batch_size=1024, sequence_length=4096)
    result = hetplan.plan(model, cluster, job)
    print(result.summary())

Every name here is imported when it is first used, so that `import hetplan` costs nothing.
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
    from hetplan.comparison.compare import compare
    from hetplan.importers.table import import_file
    from hetplan.job.load import load_job
    from hetplan.job.spec import Job
    from hetplan.library.inputs import make_job
    from hetplan.library.replan import replan
    from hetplan.library.result import Result
    from hetplan.library.values import Cluster, load_cluster, load_model
    from hetplan.library.verbs import estimate, load_plan, plan, sweep
    from hetplan.model.spec import ModelSpec
    from hetplan.plans.plan import Plan
    from hetplan.predict.fit import fit
    from hetplan.trainers.emission import emit

__all__ = [
    "Cluster",
    "HetplanError",
    "InfeasibleError",
    "InputError",
    "Job",
    "LaunchError",
    "LimitError",
    "ModelSpec",
    "Plan",
    "ProfileError",
    "Result",
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
    "make_job",
    "plan",
    "replan",
    "sweep",
]

_HOMES = {
    "Cluster": "hetplan.library.values",
    "Job": "hetplan.job.spec",
    "ModelSpec": "hetplan.model.spec",
    "Plan": "hetplan.plans.plan",
    "Result": "hetplan.library.result",
    "compare": "hetplan.comparison.compare",
    "emit": "hetplan.trainers.emission",
    "estimate": "hetplan.library.verbs",
    "fit": "hetplan.predict.fit",
    "import_file": "hetplan.importers.table",
    "load_cluster": "hetplan.library.values",
    "load_job": "hetplan.job.load",
    "load_model": "hetplan.library.values",
    "load_plan": "hetplan.library.verbs",
    "make_job": "hetplan.library.inputs",
    "plan": "hetplan.library.verbs",
    "replan": "hetplan.library.replan",
    "sweep": "hetplan.library.verbs",
}


def __getattr__(name: str) -> object:
    """The public name, imported on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hetplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
