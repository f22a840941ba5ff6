"""Plans under bandwidths that were measured between regions: `python -m evaluation robust`.

Two nodes of eight A100, one in each of two regions, train Llama 2 13B. The link between them has
the median of one set of measured pairs of regions, for each device, and varies as the set does:
nothing in the reference data was measured over time.

    AWS     45 pairs of cities, published with DT-FM, in three sets by their round trip
    GCP     Sailor's curves of one A100 and one V100, in five zones, at 64 MB: within us-central1,
            and from there to us-west1. They are of whole messages, so no round trip is added

Each set: the plan of the shortest step (nominal) and that of --objective robust in the same draws;
last how far the worst tenth moves with the seed where the speed of the devices varies as well.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from evaluation.output import WORDS, Answer, Section, frame_of
from evaluation.search.sailor import NETWORK, Fit
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.drafting.draft import drafted_cluster
from hetplan.errors import InputError
from hetplan.files.shipped import default_stores, shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Objective, Variation
from hetplan.model.load import load_model
from hetplan.plans.pieces import islands_in_use
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.whatif.objectives import by_objective
from hetplan.whatif.robust import DRAWS, Worlds, risk_of

PAIRS = Path("unit/wan_city_pairs.csv")
BANDS_MS = ((0.0, 75.0), (75.0, 150.0), (150.0, math.inf))
"""Round trips of neighbours, of coasts, and around the world: 10, 16 and 19 pairs."""
MESSAGE_BYTES = 64e6
SPEED_SPREAD = 0.05
COUNTS = (50, 100, 200, 400)
SEEDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSet:
    """Bandwidths of pairs of regions that are alike."""

    name: str
    round_trip_ms: float
    gbit_per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustRow:
    """A set, and both plans in its draws."""

    pairs: str
    samples: int
    median_gbit: float
    nominal_regions: int
    nominal_median_seconds: float
    nominal_worst_seconds: float
    robust_regions: int
    robust_median_seconds: float
    robust_worst_seconds: float


def pair_sets(reference: Path) -> tuple[PairSet, ...]:
    """All sets; InputError where a file is missing."""
    for each in (PAIRS, NETWORK):
        if not (reference / each).is_file():
            raise InputError(f"{reference / each} is not there; give its folder with --reference")
    return (*_cities(reference / PAIRS), *_zones(reference / NETWORK))


def _cities(path: Path) -> Iterator[PairSet]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            (float(row["rtt_or_delay_ms_as_published"]), float(row["bandwidth_gbit_per_s"]))
            for row in csv.DictReader(file)
        ]
    for low, high in BANDS_MS:
        found = [row for row in rows if low <= row[0] < high]
        words = f"under {high:g} ms" if not low else f"{low:g} ms and more"
        if low > 0.0 and high < math.inf:
            words = f"{low:g} to {high:g} ms"
        yield PairSet(
            name=f"AWS, {words}",
            round_trip_ms=statistics.median(row[0] for row in found),
            gbit_per_second=tuple(row[1] for row in found),
        )


def _zones(path: Path) -> Iterator[PairSet]:
    found: dict[bool, list[float]] = {False: [], True: []}
    curves = json.loads(path.read_bytes())
    for zone, others in curves.items():
        for left, right in (("A100-40", "V100-16"), ("V100-16", "A100-40")):
            for to, there in others[left]["1"].items():
                if to != zone and right in there:
                    (a, b, c), _ = there[right]["1"]
                    seconds = Fit(a=a, b=b, c=c).seconds(MESSAGE_BYTES)
                    apart = zone.rpartition("-")[0] != to.rpartition("-")[0]
                    found[apart].append(8e-9 * MESSAGE_BYTES / seconds)
    for apart, name in ((False, "within us-central1"), (True, "us-central1 to us-west1")):
        yield PairSet(name=f"GCP, {name}", round_trip_ms=0.0, gbit_per_second=tuple(found[apart]))


def question(pairs: PairSet) -> tuple[Cluster, Job]:
    """The cluster with a set's median link, and the job that varies as the set does."""
    link = f"A B {statistics.median(pairs.gbit_per_second):g}Gbit {pairs.round_trip_ms:g}ms each"
    cluster = load_cluster(drafted_cluster(("1x8 a100 @A", "1x8 a100 @B"), (link,)).document)
    vary = Variation(of=("A", "B"), samples=pairs.gbit_per_second)
    return cluster, replace(
        load_job(shipped_folder("configs") / "jobs" / "llama-2-7b.yaml"),
        global_batch_size=256,
        objective=Objective.ROBUST,
        vary=(vary,),
        gap=0.02,
        time_limit_seconds=None,
    )


def robust_row(pairs: PairSet, predictor: Predictor) -> tuple[RobustRow, SearchResult]:
    """Both plans, and the nominal one's result."""
    cluster, job = question(pairs)
    model = load_model(shipped_folder("configs") / "models" / "llama-2-13b.yaml")
    nominal = search(model, cluster, job, predictor)
    robust = by_objective(nominal, predictor)
    worlds = Worlds.of(nominal.inputs, predictor)
    risks = [risk_of(worlds.seconds(each.plan, range(DRAWS))) for each in (nominal, robust)]
    regions = [len(islands_in_use(each.plan, cluster)) for each in (nominal, robust)]
    return RobustRow(
        pairs=pairs.name,
        samples=len(pairs.gbit_per_second),
        median_gbit=statistics.median(pairs.gbit_per_second),
        nominal_regions=regions[0],
        nominal_median_seconds=risks[0].median_seconds,
        nominal_worst_seconds=risks[0].worst_seconds,
        robust_regions=regions[1],
        robust_median_seconds=risks[1].median_seconds,
        robust_worst_seconds=risks[1].worst_seconds,
    ), nominal


def sampling_errors(nominal: SearchResult, predictor: Predictor) -> dict[int, float]:
    """By number of draws, the deviation of the worst tenth over seeds, relative."""
    kind = nominal.inputs.cluster.islands[0].device.kind
    speed = Variation(of=(kind,), spread=SPEED_SPREAD)
    job, found = nominal.inputs.job, {}
    for count in COUNTS:
        worst = []
        for seed in range(SEEDS):
            asked = replace(job, seed=seed, vary=(*job.vary, speed))
            worlds = Worlds.of(nominal.inputs.changed(job=asked), predictor, count)
            risk = risk_of(worlds.seconds(nominal.plan, range(count)))
            worst.append(risk.worst_seconds)
        found[count] = float(np.std(worst, ddof=1) / np.mean(worst))
    return found


def robust_answer(reference: Path) -> Answer:
    """Every set, and the sampling error on the set whose nominal plan has the most to lose."""
    predictor = with_shipped(fit_stores(*default_stores())[0])
    found = [robust_row(each, predictor) for each in pair_sets(reference)]
    rows = [row for row, _ in found]
    _, exposed = max(found, key=lambda e: e[0].nominal_worst_seconds / e[0].nominal_median_seconds)
    errors = sampling_errors(exposed, predictor)
    said = ", ".join(f"{error:.2%} with {count}" for count, error in errors.items())
    return Answer(
        sections=(
            Section(
                frame=frame_of(rows),
                name="rows",
                title="Regions in use, median step and worst tenth in s: nominal, robust",
                columns={
                    "link varies as": ("pairs", WORDS),
                    "Gbit/s": ("median_gbit", "{:.3g}"),
                    "in": ("nominal_regions", "{}"),
                    "median": ("nominal_median_seconds", "{:.1f}"),
                    "worst": ("nominal_worst_seconds", "{:.1f}"),
                    "robust in": ("robust_regions", "{}"),
                    "median ": ("robust_median_seconds", "{:.1f}"),
                    "worst ": ("robust_worst_seconds", "{:.1f}"),
                },
            ),
        ),
        lines=(
            f"deviation of a worst tenth over {SEEDS} seeds, link and speed "
            f"({SPEED_SPREAD:.0%}) varied: {said} draws",
        ),
        values={"sampling_errors": {str(count): error for count, error in errors.items()}},
    )
