"""By when is a step done with a given probability?

The same draws of the predictions' errors and of slow devices as an estimate's interval
(`hetplan.cost.estimate`), at any quantile. Plans that are priced with one seed share their
draws, so that two of them are compared under the same luck.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.estimate import scaled_logs, step_calibration, step_causes
from hetplan.cost.step_model.draws import drawn_steps, straggler_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import Plan


def step_quantile(pricer: Pricer, plan: Plan, quantile: float) -> float:
    """Seconds that a step stays below with this probability; `quantile` between 0 and 1."""
    step, costs = pricer.step(plan), pricer.costs(plan)
    central = step.step_seconds + straggler_wait(plan, costs, step)
    known = step_calibration(pricer.predictor, plan, pricer.cluster, step_causes(plan, costs, step))
    logs, _, _ = scaled_logs(drawn_steps(plan, costs, step), central, known)
    return central * float(np.exp(np.quantile(logs, quantile, method="hazen")))
