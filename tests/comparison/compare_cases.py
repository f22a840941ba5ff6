"""A plan with an estimate by simple laws, and logs of runs that took what it says, or not."""

from __future__ import annotations

from cost_fakes import job, model, two_islands
from estimate_plans import plan_with, stages_of
from trainer_plans import result_of
from training_logs_rendered import megatron_line, megatron_timers

from hetplan.cost.estimate import estimate
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult

PREDICTOR = FittedPredictor.datasheet_only()


def small_result(cut: int = 6, sizes: tuple[int, int] = (4, 4)) -> SearchResult:
    """Two stages, the embedding and `cut` - 1 layers on the first."""
    asked = job(global_batch_size=32, gradient_clipping=True)
    shape, machines = model(hidden_size=1024, ffn_hidden_size=4096, head_dim=128), two_islands()
    count = 32 // sizes[0]
    stages = stages_of([(0, cut)], sizes, shape.num_layers + 2, num_microbatches=count)
    plan = plan_with(shape, machines, asked, [(stages, count)])
    return result_of(
        machines, plan, shape, asked, priced=estimate(plan, shape, machines, asked, PREDICTOR)
    )


def timers_of(result: SearchResult, added: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Milliseconds of Megatron-LM's timers if the run took what the stages say, and `added` seconds
    more in the named ones; written apart from what reads it."""
    count = result.estimate.num_microbatches
    stages = result.estimate.stages
    passes = {
        "forward-compute": [count * stage.forward_seconds for stage in stages],
        "backward-compute": [count * stage.backward_seconds for stage in stages],
        "all-grads-sync": [stage.reduction_seconds for stage in stages],
    }
    longer = {name: added.get(name, 0.0) for name in (*passes, "wait")}
    schedule = [
        count * (stage.forward_seconds + stage.backward_seconds)
        + sum(c.seconds for c in stage.components if c.component.value in ("bubble", "pp"))
        + stage.reduction_seconds
        + sum(longer.values())
        for stage in stages
    ]
    ends = ("gradient norm", "optimizer", "parameter gathering")
    found = {
        "forward-backward": schedule,
        **{name: [value + longer[name] for value in values] for name, values in passes.items()},
        "optimizer": [
            sum(c.seconds for c in stage.components if c.component.value in ends)
            + added.get("optimizer", 0.0)
            for stage in stages
        ],
    }
    return {name: (min(values) * 1e3, max(values) * 1e3) for name, values in found.items()}


def run_text(
    result: SearchResult,
    *,
    added: dict[str, float] | None = None,
    lines: int = 20,
    timers: bool = True,
    factor: float = 1.0,
) -> str:
    """A log with one line per 10 steps; the first one slow."""
    more = added or {}
    step = factor * result.estimate.step_seconds + sum(more.values())
    found = []
    for at in range(1, lines + 1):
        seconds = step + (30.0 if at == 1 else 0.0)
        found.append(megatron_line(10 * at, 1e3 * seconds, batch=32))
        if timers:
            found.append(megatron_timers(timers_of(result, more)))
    return "\n".join(found) + "\n"
