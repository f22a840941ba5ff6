"""Local steps against synchronous ones on an emulated cluster: `python -m evaluation local-steps`.

Two regions of one core each, a narrow long link between them, one pipeline on each, the same batch:
once the gradients are summed in every step, once the sites are averaged every few steps. Both are
trained for real as `hetplan launch` does (root; network namespaces of this machine).

Predicted is what one step saves: passes are the same, so it is a matter of the link alone, whose
figures are those of the cluster file. Measured is the same of the mean step after the first round.
The other column is the loss.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from evaluation.output import Answer, Section, frame_of
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.emulation.running import emulated
from hetplan.emulation.tools import require
from hetplan.files.reading import document_of
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Synchronisation
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.launchers.run_log import RunLog
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_plan
from hetplan.plans.local_steps import local_steps_plan
from hetplan.plans.plan import Plan
from hetplan.predict.fit import fit_stores
from hetplan.predict.predictor import Predictor
from hetplan.reports.terminal import ProgressLine
from hetplan.search.files import priced_result
from hetplan.search.result import Inputs
from hetplan.whatif.ask import ask

NAME = "two-sites-local"
_FABRIC = "{bandwidth: 2 Gbit/s, latency: 50 us, transport: host-staged}"
_ISLAND = (
    "device: emulated-core, nodes: 1, devices_per_node: 1, "
    f"intra_node: {_FABRIC}, inter_node: {_FABRIC}"
)
CLUSTER = f"""schema: hetplan.cluster/2
name: {NAME}
devices:
  - {{kind: emulated-core, vendor: generic, memory: 1 GiB, memory_bandwidth: 10 GB/s,
     peak: {{float32: 20 GFLOP/s}}, provenance: measured, source: a core of this machine}}
regions:
  - {{name: east, islands: [{{name: east, node_names: [east1], {_ISLAND}}}]}}
  - {{name: west, islands: [{{name: west, node_names: [west1], {_ISLAND}}}]}}
region_links:
  - {{between: [east, west], bandwidth_shared: 30 Mbit/s, round_trip: 20 ms,
     transport: host-staged}}
"""
WANTED = Synchronisation(sync_steps=8, extra_tokens=0.0, num_fragments=2)
BATCH = 8
"""Samples of a step."""
ROUNDS = 6
"""Of `sync_steps` each; the first counts in no mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the two plans, predicted and trained."""

    name: str
    predicted_seconds: float
    run: RunLog

    @property
    def measured_seconds(self) -> float:
        """Mean of the steps after the first round: averaging comes once in a round."""
        return statistics.fmean(each.seconds for each in self.run.steps[WANTED.sync_steps :])


def local_steps_answer() -> Answer:
    """Predicted beside measured, and both losses."""
    together, local = _cases()
    saved = [
        getattr(together, name) - getattr(local, name)
        for name in ("predicted_seconds", "measured_seconds")
    ]
    rows = [
        {"step": at + 1, "together": one.loss, "local": two.loss}
        for at, (one, two) in enumerate(zip(together.run.steps, local.run.steps, strict=True))
        if at % WANTED.sync_steps == WANTED.sync_steps - 1
    ]
    columns = {"step": ("step", "{}"), **{n: (n, "{:.4f}") for n in ("together", "local")}}
    title = f"loss; averaged every {WANTED.sync_steps} steps in {WANTED.num_fragments} fragments"
    load = max(each.run.machine.load_before for each in (together, local))
    return Answer(
        sections=(Section(frame=frame_of(rows), name="losses", title=title, columns=columns),),
        lines=(
            f"measured: {together.measured_seconds:.3f} s a step together, "
            f"{local.measured_seconds:.3f} s in local steps",
            f"a step saves {saved[0]:.3f} s predicted, {saved[1]:.3f} s measured "
            f"({saved[0] / saved[1] - 1.0:+.1%}); load before {load:.2g}",
        ),
        values={"predicted_saving_seconds": saved[0], "measured_saving_seconds": saved[1]},
    )


def _cases() -> tuple[Case, Case]:
    require()
    cluster = load_cluster(document_of("cluster.yaml", CLUSTER.encode()))
    model = load_model(shipped_folder("configs") / "models" / "gpt-tiny.yaml")
    job = load_job(shipped_folder("configs") / "jobs" / "gpt-tiny.yaml")
    job = replace(job, global_batch_size=BATCH, pin=replace(job.pin, pipelines=None))
    job = replace(job, synchronisation=WANTED)
    inputs = Inputs(model=model, cluster=cluster, job=job, sha256=())
    predictor, _ = fit_stores()  # the links are those of the cluster file
    plans = _plans(inputs, predictor)
    with emulated(inputs.cluster, name=NAME):
        first, second = (_trained(name, plan, inputs, predictor) for name, plan in plans.items())
    return first, second


def _plans(inputs: Inputs, predictor: Predictor) -> dict[str, Plan]:
    half = inputs.with_job(global_batch_size=BATCH // 2, synchronisation=None)
    sites = [ask(half.without_islands(out), predictor).plan for out in ("west", "east")]
    given: tuple[ModelSpec, Cluster, Job] = (inputs.model, inputs.cluster, inputs.job)
    pipelines = [pipeline for site in sites for pipeline in site.pipelines]
    return {
        "together": assemble_plan(*given, pipelines, overlap=sites[0].overlap),
        "local": local_steps_plan(*given, sites, sites[0]),
    }


def _trained(name: str, plan: Plan, inputs: Inputs, predictor: Predictor) -> Case:
    priced = estimate(plan, inputs.model, inputs.cluster, inputs.job, predictor)
    steps = ROUNDS * WANTED.sync_steps
    with ProgressLine(f"training {name}") as line:
        run = launch(
            priced_result(inputs, plan, priced, ""),
            LaunchSettings(steps=steps, emulation=NAME),
            on_step=lambda done: line.show(
                done.step + 1,
                steps,
                done.seconds * (steps - done.step - 1),
                f"loss {done.loss:.4f}",
            ),
        )
    return Case(name=name, predicted_seconds=priced.step_seconds, run=run)
