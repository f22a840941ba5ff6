"""Which laws has a kind of products in a narrow format: its own, or those of a board of its chip?

A board's laws are carried by the rates of the format and by the memory bandwidths, as those of the
wide formats are (`kinds.operators`). Without them `layer.float8` changes the wide laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import WITH_WEIGHTS
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.kinds.operators import Rated, carried, nearest_board, rates
from hetplan.predict.operator.answer import DeviceOperators, index_operators
from hetplan.predict.operator.values import OperatorLaw


class NarrowLaws:
    """The laws of narrow formats that were measured."""

    def __init__(self, laws: Sequence[OperatorLaw]) -> None:
        self._laws = tuple(law for law in laws if law.precision in tuple(ProductFormat))
        self.of = cache(self._of)
        """(device, `ProductFormat` value, precision) -> its operators; None: nothing is known."""

    def _of(
        self, device: DeviceKind, product_format: str, precision: Precision
    ) -> DeviceOperators | None:
        asked = ProductFormat(product_format)
        if asked is ProductFormat.MXFP8:
            asked = ProductFormat.FLOAT8
        target = rates(device, asked.rate)
        if target is None:
            return None
        known = known_kinds()
        rated = [
            Rated(law=law, rates=there)
            for law in self._laws
            if law.precision == asked and law.device in known
            if (there := rates(known[law.device], asked.rate)) is not None
        ]
        laws = [
            carried(each, target, asked.value)
            for operator in WITH_WEIGHTS
            for each in nearest_board(
                [one for one in rated if one.law.operator == operator], device, asked.value
            )
        ]
        found = index_operators(laws).get((device.kind, asked.value))
        # What a product writes is as wide as the rest of the layer.
        return None if found is None else replace(found, precision=precision.value)
