"""A search result with everything that a person asks of it, as methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.cost.energy.energy import Energy, WholeRun, energy_of, whole_run
from hetplan.errors import printable
from hetplan.files.settings import given_path
from hetplan.files.writing import write_atomically
from hetplan.library.inputs import predictor_of
from hetplan.library.values import File, fields_of, short
from hetplan.predict.predictor import Predictor
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult

if TYPE_CHECKING:
    from pandas import DataFrame

    from hetplan.reports.summary import StageRow
    from hetplan.whatif.limits import Limits


class Result(SearchResult):
    """A plan, its estimate and its certificate.

    `plan`, `estimate` and `load_plan` give it. It has the fields of a `SearchResult`: `plan`,
    `estimate`, `certificate`, `alternatives`, `inputs` and more. In a notebook it shows the ten
    lines and the pipeline.
    """

    __slots__ = ("_predictor",)
    # No field: a plan file does not hold it. What prices the plan again asks it.
    _predictor: Predictor

    @classmethod
    def of(cls, result: SearchResult, predictor: Predictor | None = None) -> Result:
        """The result with these methods; those that price again ask the predictor."""
        own = cls(**fields_of(result))
        if predictor is not None:
            object.__setattr__(own, "_predictor", predictor)
        return own

    def __reduce__(self) -> tuple[Callable[..., Result], tuple[object, ...]]:
        # A copy asks the same predictor, also in another process.
        return _restored, (type(self), fields_of(self), getattr(self, "_predictor", None))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peaks of the plan's devices, 0 to 1.

        None where a peak in the products' number format is not known. By kind: `estimate.kinds`.
        """
        return self.estimate.mfu

    @property
    def step_seconds(self) -> float:
        """Predicted time of one optimizer step.

        Its 90 % interval: `estimate.p5_seconds` and `estimate.p95_seconds`.
        """
        return self.estimate.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole plan, at the predicted step."""
        return self.estimate.tokens_per_second

    @property
    def energy(self) -> Energy | None:
        """Energy of a step at the meter, by island: kWh with an interval, mean watts.

        None where the power of an island is not known.
        """
        return energy_of(self.plan, self.estimate, self.inputs.cluster)

    @property
    def run(self) -> WholeRun | None:
        """The whole run with lost time: `days`, `kwh`, `usd`, causes; None without total_tokens."""
        of = self.inputs
        return whole_run(self.plan, self.estimate, of.model, of.cluster, of.job)

    @property
    def gap(self) -> float | None:
        """Part of the step by which another plan could be faster, at most, 0 to 1.

        None for a layout that was given: no search says what else there is.
        """
        return None if self.certificate is None else self.certificate.gap

    @property
    def fits(self) -> bool:
        """Whether every stage has room in memory; plans that were searched have."""
        return self.estimate.fits

    @property
    def stages(self) -> tuple[StageRow, ...]:
        """Runs of alike neighbouring stages, as the summary shows them.

        Each has `first` and `last` stage, islands, degrees, layers of each stage, memory in bytes
        and busy parts of the step. `to_pandas` has single stages.
        """
        from hetplan.reports.summary import summarize

        return summarize(self).rows

    def summary(self, width: int = 80) -> str:
        """The plan in ten lines of `width` columns.

        What was found, what it costs, its stages, what limits it, how good it is and what it rests
        on.
        """
        return "\n".join(map(printable, self._lines(width)))

    def _lines(self, width: int = 80) -> Iterator[str]:
        from hetplan.reports.summary import summarize

        return summarize(self).lines(width)

    def __repr__(self) -> str:
        return short(self._lines(), more=": print(result.summary())")

    def _repr_html_(self) -> str:
        """For notebooks: the pipeline as a picture over the lines of `repr`."""
        from hetplan.library.picture import result_html

        return result_html(self.stages, self.inputs.cluster, repr(self))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, SearchResult) and fields_of(self) == fields_of(other)
        return same if isinstance(other, SearchResult) else NotImplemented

    __hash__ = SearchResult.__hash__

    def to_pandas(self) -> DataFrame:
        """One row per stage; units are in the columns' names.

        Degrees that differ within a stage are texts such as "8/4". The column `devices` counts
        those of the stage; bytes are of one device; forward and backward seconds of one microbatch,
        the other seconds of the whole step.
        """
        import pandas as pd

        costs = iter(self.estimate.stages)
        return pd.DataFrame(
            [
                {
                    "pipeline": row.pipelines[0],
                    "stage": number,
                    "island": "+".join(island.name for island in row.islands),
                    "device": row.islands[0].device.kind,
                    "devices": row.devices_per_stage,
                    **{name: _one(getattr(row, name)) for name in _DEGREES},
                    "num_microbatches": row.num_microbatches,
                    "recompute": row.recompute,
                    "layers": cost.transformer_layers,
                    **{name: getattr(cost, name) for name in _SECONDS},
                    "busy_share": cost.busy_seconds / self.step_seconds,
                    **{name: getattr(cost.memory, name) for name in _BYTES},
                    "fits": cost.memory.fits,
                }
                for row in self.stages
                for number, cost in zip(range(row.first, row.last + 1), costs, strict=False)
            ]
        )

    def save(self, path: File) -> None:
        """Write the plan file that `load_plan` and every command read.

        It is JSON, and replaces an older one in one step.
        """
        save_result(self, given_path(path, "path"))

    def report(self, path: File, *others: SearchResult, logs: Sequence[File] = ()) -> None:
        """Write one HTML page that needs no network.

        others: results to set beside this one. logs: files of one run of this plan, as `compare`
        reads them.
        """
        from hetplan.comparison.compare import compare
        from hetplan.reports.html.page import report_text
        from hetplan.reports.html.values import plan_view

        known = self._known()
        runs = [compare([Path(log) for log in logs], self)] if logs else []
        views = [plan_view("plan 1", self, known, runs)]
        views += [plan_view(f"plan {n}", each, known) for n, each in enumerate(others, start=2)]
        write_atomically(given_path(path, "path"), report_text(views))

    def trace(self, path: File) -> None:
        """Write one step as a trace for ui.perfetto.dev and chrome://tracing."""
        from hetplan.cost.step_model.pricer import Pricer
        from hetplan.reports.trace import trace_text

        inputs = self.inputs
        pricer = Pricer(inputs.model, inputs.cluster, inputs.job, self._known())
        write_atomically(given_path(path, "path"), trace_text(self.plan, pricer))

    def limits(self, predictor: Predictor | File | None = None) -> Limits:
        """What limits the plan, as values.

        Parts of the step that are saved where an island, a stage or a boundary is faster, one at a
        time; what comes behind the pipeline, in seconds; stages whose memory is nearly full.
        """
        from hetplan.whatif.limits import limits

        return limits(self, self._known(predictor))

    def explain(
        self, predictor: Predictor | File | None = None, *, progress: bool | None = None
    ) -> str:
        """What limits the plan, and why islands are idle, in words.

        It plans again for every idle island, to find from which bandwidth, memory or batch it
        would pay: that takes as long as some searches.
        """
        from hetplan.reports.explained import idle_lines, limit_lines
        from hetplan.reports.progress import ProgressLine
        from hetplan.whatif.idle import idle_reasons

        known, idle = self._known(predictor), self.idle
        if not idle:
            with ProgressLine("planning with idle islands", progress) as line:
                idle = idle_reasons(
                    self, known, progress=lambda at, of, name: line.show(at, of, None, name)
                )
        return "\n".join((*limit_lines(self.limits(known)), *idle_lines(idle, self)))

    def what_if(
        self, predictor: Predictor | File | None = None, *, progress: bool | None = None
    ) -> Result:
        """The same plan with why devices are idle, what changes are worth, and the best kind alone.

        In `idle`, `prices` and `alone`; `report` and `save` keep them. It plans again for every
        change, half a bandwidth or one more node, and takes as long as some searches.
        """
        from hetplan.reports.progress import ProgressLine
        from hetplan.whatif.kept import with_what_ifs

        known = self._known(predictor)
        with ProgressLine("planning with one change at a time", progress) as line:
            every = with_what_ifs(self, known, lambda at, of, what: line.show(at, of, None, what))
            *_, found = self, *every
        return Result.of(found, known)

    def _known(self, given: Predictor | File | None = None) -> Predictor:
        """The predictor that is given, else the plan's own, else the one of today's measurements;
        a warning where the plan was made with another.
        """
        own: Predictor | None = getattr(self, "_predictor", None)
        if given is None and own is not None:
            return own
        found, digest = predictor_of(given)
        made_with = dict(self.inputs.sha256).get("predictor")
        if given is None and made_with not in (None, digest):
            warnings.warn(
                "the plan was made with another predictor than today's measurements give; its "
                "times may differ from these: pass the predictor",
                stacklevel=3,
            )
        return found


def _restored(kind: type[Result], values: dict[str, Any], predictor: Predictor | None) -> Result:
    return kind.of(kind(**values), predictor)


def _one(values: tuple[int, ...]) -> int | str:
    return values[0] if len(values) == 1 else "/".join(map(str, values))


_DEGREES = ("tp", "cp", "ep", "dp", "microbatch_size")
_SECONDS = (
    "forward_seconds", "backward_seconds", "tensor_parallel_seconds", "busy_seconds",
    "wait_seconds", "reduction_seconds", "optimizer_seconds",
)  # fmt: skip
_BYTES = (
    "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "temporary_bytes",
    "buffer_bytes", "total_bytes", "available_bytes", "host_bytes",
)  # fmt: skip
