"""From measurements to the predictor that the cost model asks; how it is stored and read back.

Every prediction says where it came from. For a layer the first that there is answers: whole layers
measured on the device, the very shape by its own median; operators measured on it, summed
(`layer.composed`); both `measured`. Else operators that other people measured on the kind, which
hetplan ships (`with_shipped`). Else `related`, laws of other kinds of device carried by the
datasheet's figures (`kinds.related`). Else `datasheet`, with the datasheet's wide interval and a
note that names what is missing. Nothing falls back in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.links import Link, Transport
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import OperatorClass
from hetplan.predict import datasheet
from hetplan.predict.calibration.values import Calibration, corrected, corrected_law, factor_of
from hetplan.predict.kinds.related import OwnOperators, Related, with_prior
from hetplan.predict.law_parts import outside
from hetplan.predict.layer import float8
from hetplan.predict.layer.answer import by_layer_law
from hetplan.predict.layer.composed import layer_prediction, worth_saying
from hetplan.predict.layer.laws import fit_layer_laws
from hetplan.predict.layer.values import ALL_LAYERS, LayerLaw
from hetplan.predict.link import prior
from hetplan.predict.link.laws import (
    collective_law,
    fit_link_laws,
    of_transport,
    send_law,
)
from hetplan.predict.link.shapes import LinkLaw
from hetplan.predict.operator.answer import DeviceOperators
from hetplan.predict.operator.laws import fit_operator_laws
from hetplan.predict.operator.values import OperatorLaw, element_bytes
from hetplan.predict.populations import choose
from hetplan.predict.predictor import (
    BY_OTHERS,
    DATASHEET,
    MEASURED,
    LayerQuery,
    Prediction,
    SendLaw,
    link_cause,
)
from hetplan.profiling.bursts import BY_OTHERS_LOG_HALFWIDTH
from hetplan.profiling.samples import LinkOperation, Phase, ProfileSet
from hetplan.version import __version__

SCHEMA = "hetplan.predictor/2"
SHIPPED_LAWS = "kinds/laws.json"
"""In the shipped profiles: laws of the samples beside it."""
SHIPPED_FITS = "fitted"
"""In the shipped profiles: what the fit makes of stores, in files named by `stores_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaws:
    """What `hetplan fit` writes: laws, and which measurements they came from."""

    hetplan_version: str
    layers: tuple[LayerLaw, ...]
    links: tuple[LinkLaw, ...]
    populations: tuple[str, ...]
    """The populations that were used, in words: device, date, driver, threads, pace."""
    notes: tuple[str, ...]
    """What was passed over, and why."""
    operators: tuple[OperatorLaw, ...] = ()
    calibration: Calibration | None = None
    """What measured steps said about these laws (`hetplan compare calibrate`)."""


@dataclass(frozen=True)
class FittedPredictor:
    """A `Predictor` over fitted laws; the datasheet answers, visibly, where there is no law."""

    laws: FittedLaws
    shipped: tuple[OperatorLaw, ...] = ()
    """Laws of classes of operators that nobody measured for `laws`."""

    def __reduce__(
        self,
    ) -> tuple[type[FittedPredictor], tuple[FittedLaws, tuple[OperatorLaw, ...]]]:
        # Another process makes the look-ups anew: most would be longer than the laws.
        return FittedPredictor, (self.laws, self.shipped)

    @cached_property
    def _layers(self) -> dict[tuple[str, str, str, str], LayerLaw]:
        laws = self.laws.layers
        return {(law.device, law.precision, law.layer, law.phase): law for law in laws}

    @cached_property
    def _measured(self) -> frozenset[tuple[str, str]]:
        return frozenset((law.device, law.precision) for law in self.laws.layers)

    @cached_property
    def _links(self) -> dict[tuple[str, bool], LinkLaw]:
        """Laws by link name and whether they are of host-staged transfers."""
        return {
            (law.link, staged): own
            for law in self.laws.links
            for staged in (False, True)
            if (own := of_transport(law, staged=staged)) is not None
        }

    @cached_property
    def related(self) -> Related:
        """What laws of other kinds say of a kind."""
        return Related(self.laws.layers, self._operator_laws)

    @cached_property
    def _operators(self) -> OwnOperators:
        return OwnOperators(self._operator_laws, self.related)

    @cached_property
    def _operator_laws(self) -> tuple[OperatorLaw, ...]:
        return (*self.laws.operators, *self.shipped)

    @cached_property
    def _measured_by(self) -> dict[tuple[str, str], dict[str, str]]:
        """By kind and precision: `MEASURED` or `BY_OTHERS` of each class of operators."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        for laws, source in ((self.shipped, BY_OTHERS), (self.laws.operators, MEASURED)):
            for law in laws:
                found.setdefault((law.device, law.precision), {})[law.operator] = source
        return found

    def operators(self, device: DeviceKind, precision: Precision) -> DeviceOperators | None:
        """The operators of this kind that were measured on it; None: none were."""
        return self._operators.of(device, precision)

    @classmethod
    def datasheet_only(cls) -> FittedPredictor:
        """A predictor for clusters of which nothing was measured."""
        return cls(
            FittedLaws(hetplan_version=__version__, layers=(), links=(), populations=(), notes=())
        )

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Time of one pass of one layer on one tensor-parallel rank, without communication."""
        return corrected(self._layer(device, query), factor_of(self.laws.calibration, device.kind))

    def _layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """The first that answers: law of whole layers, operators, other kinds, datasheet.

        Narrow products change a law of whole layers as they change the sum of its operators.
        """
        plain = float8.in_one_format(query)
        if plain is not query:
            whole = self._layer(device, plain)
            narrow, wide = self._by_parts(device, query), self._by_parts(device, plain)
            return narrow if whole == wide else float8.scaled(whole, wide, narrow)
        law = self._layers.get((device.kind, query.precision.value, query.layer.value, query.phase))
        if law is None:
            return self._by_parts(device, query)
        own = by_layer_law(law, query)
        return with_prior(own, law, query, lambda other: self._by_parts(device, other))

    def _by_parts(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """One pass of a layer without any law of whole layers of this kind."""
        # A search asks this millions of times: without laws nothing is walked through.
        if self._operator_laws or self.laws.layers:
            composed = layer_prediction(
                self.operators(device, query.precision),
                device,
                query,
                lent=self.related.operators,
                narrow=self.related.narrow,
            )
            if composed is not None:
                return self._with_sources(composed, device, query)
            answer = self.related.layer(device, query)
            if answer is not None:
                return answer
        notes = self._missing(device, query.precision, f"{query.layer.value} {query.phase}")
        answer = datasheet.layer(device, query, notes)
        if not query.kernels.product_format:
            return answer
        return float8.by_datasheet(answer, device, query)

    def _with_sources(
        self, composed: Prediction, device: DeviceKind, query: LayerQuery
    ) -> Prediction:
        """The sum of operators with who measured its products, or all of it.

        Where the user measured some of its operators and others some, each part says who did.
        """
        formats = query.precision.value, float8.law_format(query)
        wide, narrow = (self._measured_by.get((device.kind, each), {}) for each in formats)
        by = wide | narrow
        alone = BY_OTHERS if set(by.values()) == {BY_OTHERS} else MEASURED
        whole = by.get(OperatorClass.MATRIX_PRODUCT, alone)
        parts, notes = composed.parts, composed.extrapolating
        if len(set(by.values())) > 1:
            parts = tuple(replace(part, source=by.get(part.name, "")) for part in parts)
        elif whole == BY_OTHERS:
            notes = worth_saying(notes)
        return replace(composed, source=whole, extrapolating=notes, parts=parts)

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """Time to update this many parameters on one rank."""
        update = self._update(device, optimizer, parameters, precision)
        return corrected(update, factor_of(self.laws.calibration, device.kind))

    def _update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        phase = f"{Phase.OPTIMIZER.value}:{optimizer.value}"
        law = self._layers.get((device.kind, precision.value, ALL_LAYERS, phase))
        if law is None:
            related = self.related.optimizer_update(device, optimizer, parameters, precision)
            if related is not None:
                return related
            notes = self._missing(device, precision, phase)
            return datasheet.optimizer_update(device, optimizer, parameters, precision, notes)
        for each in law.measured_updates:
            if each.parameters == parameters:
                return Prediction(
                    seconds=each.seconds, log_halfwidth=each.log_halfwidth, source=MEASURED
                )
        halfwidth, warnings = outside(law.ranges, (max(parameters, 1.0),), law.log_halfwidth)
        return Prediction(
            seconds=law.update_seconds(parameters),
            log_halfwidth=halfwidth,
            source=MEASURED,
            extrapolating=warnings,
        )

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """Point-to-point law of a link, right for messages about this large."""
        measured, notes = self._measured_link(link)
        law = send_law(measured.tables, message_bytes) if measured else None
        if law is None:
            law = prior.send(link, notes, nodes=nodes)
        return corrected_law(law, factor_of(self.laws.calibration, link_cause(link)))

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """Time of a collective (a `LinkOperation` value) among `group_size` ranks over a link."""
        if operation not in _COLLECTIVES:
            raise InputError(
                f"{operation!r} is no collective; known are {', '.join(sorted(_COLLECTIVES))}"
            )
        if group_size < 2:
            return Prediction(seconds=0.0, log_halfwidth=0.0, source=DATASHEET)
        measured, notes = self._measured_link(link)
        law = None
        if measured is not None:
            law = collective_law(
                measured,
                operation,
                group_size,
                message_bytes,
                nodes=nodes,
                groups=groups,
                fabric_bytes_per_second=prior.fabric_bytes_per_second(link),
            )
        if law is None:
            law = prior.collective(link, operation, group_size, message_bytes, notes, nodes=nodes)
        return corrected(law, factor_of(self.laws.calibration, link_cause(link)))

    @property
    def calibration(self) -> Calibration | None:
        """What measured steps said about these laws."""
        return self.laws.calibration

    def _missing(self, device: DeviceKind, precision: Precision, what: str) -> tuple[str, ...]:
        """A note where other samples of the device and precision would let one expect a law."""
        if (device.kind, precision.value) in self._measured:
            return (f"{device.kind} {precision.value} {what} not measured: datasheet",)
        return ()

    def _measured_link(self, link: Link) -> tuple[LinkLaw | None, tuple[str, ...]]:
        """What a link's samples say of its transport, or why they say nothing."""
        if link.samples is None:
            return None, ()
        staged = link.transport is Transport.HOST_STAGED
        own = self._links.get((link.samples, staged))
        if own is not None:
            return own, ()
        kind = f"{link.transport.value} " if (link.samples, not staged) in self._links else ""
        return None, (f"no {kind}samples of link {link.samples}: datasheet",)


_COLLECTIVES = frozenset(
    operation.value
    for operation in LinkOperation
    if operation not in (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)
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
            operators=fit_operator_laws(chosen.operators),
            populations=chosen.populations,
            notes=chosen.notes,
        )
    )


def fit_stores(*folders: Path) -> tuple[FittedPredictor, str]:
    """The predictor of these profile stores, and the sha256 of the file it would be saved as.

    No folders, or empty ones, give the datasheet alone. The fit of the shipped stores is shipped.
    """
    from hetplan.files.reading import read_document
    from hetplan.profiling.store import read_populations, stores_digest

    shipped = shipped_folder("profiles") / SHIPPED_FITS / f"{stores_digest(*folders)}.json"
    if shipped.is_file():
        return load_predictor(shipped), read_document(shipped).sha256
    predictor = fit_populations(read_populations(*folders)) if folders else fit_populations(())
    return predictor, hashlib.sha256(predictor_text(predictor).encode()).hexdigest()


def predictor_of_files(file: Path | None, stores: Sequence[Path]) -> tuple[FittedPredictor, str]:
    """The predictor of the file, or else one fitted from the stores; and the sha256 of its text.

    Kinds that neither has are known by what others measured.
    """
    from hetplan.files.reading import read_document

    if file is None:
        own, digest = fit_stores(*stores)
    else:
        own, digest = load_predictor(file), read_document(file).sha256
    return with_shipped(own), digest


def with_shipped(predictor: FittedPredictor) -> FittedPredictor:
    """The predictor with the shipped laws of operators that others measured.

    Whoever measured a class of operators on a kind himself, in elements as wide, keeps his laws.
    """
    own = {_subject(law) for law in predictor.laws.operators}
    shipped = tuple(law for law in _shipped_laws() if _subject(law) not in own)
    return replace(predictor, shipped=shipped)


def _subject(law: OperatorLaw) -> tuple[str, str, str]:
    width = str(element_bytes(law.precision))
    return law.device, law.operator, width


@lru_cache(maxsize=1)
def _shipped_laws() -> tuple[OperatorLaw, ...]:
    """Made by `python -m evaluation distil`, as `hetplan fit` makes laws of the samples there."""
    path = shipped_folder("profiles") / SHIPPED_LAWS
    laws = load_predictor(path).laws.operators if path.is_file() else ()
    return tuple(law.widened(BY_OTHERS_LOG_HALFWIDTH) for law in laws)


def predictor_text(predictor: FittedPredictor) -> str:
    """Canonical JSON text of the predictor, schema `hetplan.predictor/2`."""
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
