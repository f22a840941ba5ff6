"""From measurements to the predictor that the cost model asks; how it is stored and read back.

Every prediction says where it came from. Samples of the device and precision at hand: `measured`,
with the interval that left-out sizes gave. No such samples: `datasheet`, with the datasheet's wide
interval and a note that names what is missing. Nothing falls back in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict import datasheet
from hetplan.predict.columns import Column, layer_columns
from hetplan.predict.laws import ALL_LAYERS, SCHEMA, FittedLaws, LayerLaw, SizeTable, outside
from hetplan.predict.layer_laws import fit_layer_laws, measured_values
from hetplan.predict.links import SOURCE, collective_law, fit_link_laws, send_law
from hetplan.predict.populations import choose
from hetplan.predict.predictor import Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation, Phase, ProfileSet
from hetplan.version import __version__

_HOST_BACKEND = "gloo"
"""Backend of host-staged transfers; every other one moves device memory."""


@dataclass(frozen=True, slots=True)
class FittedPredictor:
    """A `Predictor` over fitted laws; the datasheet answers, visibly, where there is no law."""

    laws: FittedLaws
    _layers: dict[tuple[str, str, str, str], LayerLaw] = field(
        init=False, repr=False, compare=False
    )
    _measured: frozenset[tuple[str, str]] = field(init=False, repr=False, compare=False)
    _links: dict[str, tuple[SizeTable, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        laws = self.laws
        index = {(law.device, law.precision, law.layer, law.phase): law for law in laws.layers}
        object.__setattr__(self, "_layers", index)
        object.__setattr__(
            self, "_measured", frozenset((law.device, law.precision) for law in laws.layers)
        )
        object.__setattr__(self, "_links", {law.link: law.tables for law in laws.links})

    @classmethod
    def datasheet_only(cls) -> FittedPredictor:
        """A predictor for clusters of which nothing was measured."""
        return cls(
            FittedLaws(hetplan_version=__version__, layers=(), links=(), populations=(), notes=())
        )

    def forward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
    ) -> Prediction:
        """Forward time of one layer on one tensor-parallel rank, without communication."""
        law = self._layers.get((device.kind, precision.value, layer.value, Phase.FORWARD.value))
        if law is not None:
            return _by_law(law, model, layer, microbatch_size, sequence_length, tp, precision)
        return datasheet.forward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            notes=self._missing(device, precision, f"{layer.value} forward"),
        )

    def backward(
        self,
        device: DeviceKind,
        model: ModelSpec,
        layer: LayerKind,
        *,
        microbatch_size: int,
        sequence_length: int,
        tp: int,
        precision: Precision,
    ) -> Prediction:
        """Backward time (input and weight gradients) of the same, without recomputation."""
        law = self._layers.get((device.kind, precision.value, layer.value, Phase.BACKWARD.value))
        if law is not None:
            return _by_law(law, model, layer, microbatch_size, sequence_length, tp, precision)
        return datasheet.backward(
            device,
            model,
            layer,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            tp=tp,
            precision=precision,
            notes=self._missing(device, precision, f"{layer.value} backward"),
        )

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        phase = f"{Phase.OPTIMIZER.value}:{optimizer.value}"
        law = self._layers.get((device.kind, precision.value, ALL_LAYERS, phase))
        if law is None:
            notes = self._missing(device, precision, phase)
            return datasheet.optimizer_update(device, optimizer, parameters, precision, notes)
        seconds = sum(
            term.coefficient * (parameters if term.column == Column.PARAMETERS else 1.0)
            for term in law.terms
        )
        halfwidth, warnings = outside(law.ranges, (max(parameters, 1.0),), law.log_halfwidth)
        return Prediction(
            seconds=seconds, log_halfwidth=halfwidth, source=SOURCE, extrapolating=warnings
        )

    def send(self, link: Link, message_bytes: float) -> SendLaw:
        """Point-to-point law of a link, right for messages about this large."""
        tables, notes = self._tables(link)
        law = send_law(tables, message_bytes)
        if law is None:
            return datasheet.send(link, notes)
        return law

    def collective(
        self, link: Link, operation: str, group_size: int, message_bytes: float
    ) -> Prediction:
        """Time of a collective (a `LinkOperation` value) among `group_size` ranks over a link."""
        if operation not in _COLLECTIVES:
            raise InputError(
                f"{operation!r} is no collective; known are {', '.join(sorted(_COLLECTIVES))}"
            )
        if group_size < 2:
            return Prediction(seconds=0.0, log_halfwidth=0.0, source=datasheet.SOURCE)
        tables, notes = self._tables(link)
        law = collective_law(tables, operation, group_size, message_bytes)
        if law is None:
            return datasheet.collective(link, operation, group_size, message_bytes, notes)
        return law

    def _missing(self, device: DeviceKind, precision: Precision, what: str) -> tuple[str, ...]:
        """A note where other samples of the device and precision would let one expect a law."""
        if (device.kind, precision.value) in self._measured:
            return (f"{device.kind} {precision.value} {what} not measured: datasheet",)
        return ()

    def _tables(self, link: Link) -> tuple[tuple[SizeTable, ...], tuple[str, ...]]:
        """The tables that a link's samples give for its transport, or why there are none."""
        if link.samples is None:
            return (), ()
        staged = link.transport is Transport.HOST_STAGED
        tables = self._links.get(link.samples, ())
        fitting = tuple(table for table in tables if (table.backend == _HOST_BACKEND) == staged)
        if fitting:
            return fitting, ()
        kind = f"{link.transport.value} " if tables else ""
        return (), (f"no {kind}samples of link {link.samples}: datasheet",)


_COLLECTIVES = frozenset(
    operation.value
    for operation in LinkOperation
    if operation not in (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)
)


def _by_law(
    law: LayerLaw,
    model: ModelSpec,
    layer: LayerKind,
    microbatch_size: int,
    sequence_length: int,
    tp: int,
    precision: Precision,
) -> Prediction:
    columns = layer_columns(
        model,
        layer,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        tp=tp,
        bytes_per_element=precision.bytes_per_element,
    )
    seconds = sum(term.coefficient * columns.value(term.column) for term in law.terms)
    values = measured_values(model, layer, microbatch_size, sequence_length, tp)
    halfwidth, warnings = outside(law.ranges, values, law.log_halfwidth)
    if layer is LayerKind.TRANSFORMER:
        features = model.common_layer(sequence_length).features()
        if features:
            # Work of other kernels at the rates of the measured ones: no better than a datasheet.
            halfwidth = max(halfwidth, datasheet.MATRIX_LOG_HALFWIDTH)
            note = f"layers with {', '.join(features)} not measured: rates of plain layers"
            warnings = (*warnings, note)
    return Prediction(
        seconds=seconds, log_halfwidth=halfwidth, source=SOURCE, extrapolating=warnings
    )


def fit(profiles: ProfileSet) -> FittedPredictor:
    """The predictor of samples that belong together.

    An InputError where one shape was measured under several circumstances, because the samples
    do not say which is whose: `fit_populations` chooses. An empty set gives the datasheet alone.
    """
    return fit_populations((profiles,))


def fit_populations(populations: Sequence[ProfileSet]) -> FittedPredictor:
    """The predictor of the newest population of every device kind and link."""
    chosen = choose(populations)
    return FittedPredictor(
        FittedLaws(
            hetplan_version=__version__,
            layers=fit_layer_laws(chosen.layers),
            links=fit_link_laws(chosen.links),
            populations=chosen.populations,
            notes=chosen.notes,
        )
    )


def fit_stores(*folders: Path) -> tuple[FittedPredictor, str]:
    """The predictor of these profile stores, and the sha256 of the file it would be saved as.

    No folders, or empty ones, give the datasheet alone.
    """
    from hetplan.profiling.store import read_populations

    predictor = fit_populations(read_populations(*folders)) if folders else fit_populations(())
    return predictor, hashlib.sha256(predictor_text(predictor).encode()).hexdigest()


def predictor_text(predictor: FittedPredictor) -> str:
    """Canonical JSON text of the predictor, schema `hetplan.predictor/1`."""
    from hetplan.files.encoding import encode

    return encode(predictor.laws, schema=SCHEMA)


def save_predictor(predictor: FittedPredictor, path: Path) -> None:
    """Write the predictor's file; it replaces an older one in one step."""
    from hetplan.files.writing import write_atomically

    write_atomically(path, predictor_text(predictor))


def load_predictor(path: Path) -> FittedPredictor:
    """The predictor in a file that `save_predictor` wrote; an InputError for any other."""
    from hetplan.files.reading import decode, read_document

    return FittedPredictor(decode(read_document(path), FittedLaws, schema=SCHEMA))
