"""A peer's JSON file as values that know their place, and the samples that a list of layers gives.

Sailor, Metis, Galvatron and SimuMax write JSON without a schema number, so nothing can be taken
for granted: every key that is missing, every value of the wrong type and every number that is not
finite becomes an InputError with its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Node, Path, field_text
from hetplan.importers.json_text import json_document
from hetplan.importers.records import ImportContext
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.samples import LayerSample
from hetplan.profiling.timing import summarise

_MAX_SIZE = 1e30  # far above bytes, operations or seconds of anything; sums stay finite below it

PRECISION_WORDS = {
    "bf16": Precision.BFLOAT16,
    "bfloat16": Precision.BFLOAT16,
    "fp16": Precision.FLOAT16,
    "float16": Precision.FLOAT16,
    "fp32": Precision.FLOAT32,
    "float32": Precision.FLOAT32,
}
"""What peers call the precisions, in lower case."""

_PLAIN_WORD = re.compile(r"[\w .,()\[\]<>*/+=-]{1,80}")


def tidy(text: str) -> str:
    """Text of a file as it may stand in a note or name: plain words as they are, else escaped."""
    return text if _PLAIN_WORD.fullmatch(text) else ascii(text[:80])


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a JSON file and where it stands."""

    file: str
    path: Path
    node: Node

    @property
    def line(self) -> int:
        """1-based line where the value begins."""
        return self.node.line

    def fault(self, message: str) -> Fault:
        """A fault at this place."""
        return Fault(file=self.file, line=self.line, field=field_text(self.path), message=message)

    def refuse(self, message: str) -> InputError:
        """The error to raise at this place."""
        return InputError(self.fault(message))

    def get(self, key: str) -> Value | None:
        """The value under this key; None where there is none, or where this is no mapping."""
        if self.node.items is None or key not in self.node.items:
            return None
        return Value(self.file, (*self.path, key), self.node.items[key][1])

    def need(self, key: str) -> Value:
        """The value under this key; an InputError where there is none."""
        found = self.get(key)
        if found is not None:
            return found
        here = ", ".join(tidy(name) for name in list(self.node.items or {})[:12])
        have = f"; there are {here}" if here else ""
        raise self.refuse(f"required key {key} is missing{have}")

    def items(self) -> Iterator[tuple[str, Value]]:
        """Keys and values of a mapping; an InputError for anything else."""
        if self.node.items is None:
            raise self.refuse(f"found {self.words()}; a mapping is expected here")
        for key, (_, node) in self.node.items.items():
            yield key, Value(self.file, (*self.path, key), node)

    def entries(self) -> tuple[Value, ...]:
        """Entries of a list; an InputError for anything else."""
        if self.node.entries is None:
            raise self.refuse(f"found {self.words()}; a list is expected here")
        return tuple(
            Value(self.file, (*self.path, at), node) for at, node in enumerate(self.node.entries)
        )

    def words(self) -> str:
        """What the value is, for a message."""
        if self.node.items is not None:
            return "a mapping"
        if self.node.entries is not None:
            return "a list"
        if isinstance(self.node.scalar, str):
            return f"the text {tidy(self.node.scalar)}"
        if self.node.scalar is None:
            return "null"
        return str(self.node.scalar)[:40]

    @property
    def is_mapping(self) -> bool:
        """Whether this is a mapping."""
        return self.node.items is not None

    def try_number(self) -> float | None:
        """The finite number, or None for anything else; true and false are no numbers."""
        scalar = self.node.scalar
        if isinstance(scalar, bool) or not isinstance(scalar, int | float):
            return None
        if isinstance(scalar, float):
            return scalar if math.isfinite(scalar) and abs(scalar) <= _MAX_SIZE else None
        return float(scalar) if abs(scalar) <= _MAX_SIZE else None

    def number(self) -> float:
        """The finite number; an InputError for anything else."""
        found = self.try_number()
        if found is None:
            raise self.refuse(f"found {self.words()}; write a number of at most {_MAX_SIZE:g}")
        return found

    def positive(self) -> float:
        """The number, more than zero."""
        found = self.number()
        if found <= 0:
            raise self.refuse(f"found {found:g}; it is more than 0")
        return found

    def text(self) -> str:
        """The text, escaped where it is no plain word; an InputError for anything else."""
        if not isinstance(self.node.scalar, str):
            raise self.refuse(f"found {self.words()}; a text is expected here")
        return tidy(self.node.scalar)

    def count_key(self, key: str, what: str) -> int:
        """The key of this value, read as a count such as a microbatch size."""
        if not re.fullmatch(r"[0-9]{1,9}", key, re.ASCII) or int(key) < 1:
            raise self.refuse(f"found the key {tidy(key)}; a {what} of at least 1 is expected")
        return int(key)


def read_tree(text: str, file: str) -> Value:
    """The mapping that a JSON text holds; an InputError for any other text."""
    root = Value(file, (), json_document(file, text).node)
    if not root.is_mapping:
        raise root.refuse(f"found {root.words()}; the file holds one mapping")
    return root


def base_name(file: str) -> str:
    """The name of the file without its folders, whichever system wrote the path."""
    return re.split(r"[/\\]", file)[-1]


def need_device(context: ImportContext, tool: str) -> str:
    """The device kind that the user named."""
    if context.device is None:
        raise _not_said(context, "device", f"{tool} does not say the device kind; name it")
    return context.device


def need_model(context: ImportContext, tool: str) -> ModelSpec:
    """The model that the user named."""
    if context.model is None:
        raise _not_said(context, "model", f"{tool} does not say the layers' shapes; give the model")
    return context.model


def need_precision(context: ImportContext, tool: str) -> Precision:
    """The precision that the user named."""
    if context.precision is None:
        known = ", ".join(Precision)
        message = f"{tool} does not say the precision; name it ({known})"
        raise _not_said(context, "precision", message)
    return context.precision


def need_sequence(context: ImportContext, tool: str) -> int:
    """The sequence length that the user named."""
    if context.sequence_length is None:
        message = f"{tool} does not say the sequence length; name it"
        raise _not_said(context, "sequence_length", message)
    return context.sequence_length


def _not_said(context: ImportContext, field: str, message: str) -> InputError:
    return InputError(Fault(file=context.file, field=field, message=message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What every sample of one measurement has in common."""

    device: str
    model: ModelSpec
    precision: Precision
    sequence_length: int
    microbatch_size: int
    tp: int


def layer_sample(
    measured: Measured,
    layer: LayerKind,
    phase: str,
    seconds: Sequence[float],
    *,
    copies: int = 1,
) -> LayerSample:
    """One sample of layers that are alike, each with its time.

    The median is over all of them. `repeats` counts different times only: times that agree to the
    last digit are as a rule one measurement, written once per layer.
    """
    model = measured.model
    timing = summarise(tuple(seconds), steady=True)
    return LayerSample(
        device=measured.device,
        architecture=model.architecture.value,
        layer=layer.value,
        phase=phase,
        precision=measured.precision.value,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        sequence_length=measured.sequence_length,
        microbatch_size=measured.microbatch_size,
        tp=measured.tp,
        copies=copies,
        median_seconds=timing.median_seconds,
        p10_seconds=timing.p10_seconds,
        p90_seconds=timing.p90_seconds,
        repeats=len(set(seconds)),
        outliers=0,
        steady=True,
        activation_bytes=0.0,
        peak_memory_bytes=0.0,
        clock_hertz=0.0,
    )


def transformer_share(model: ModelSpec, tp: int) -> float:
    """The part of a rank's parameters that all transformer layers together hold.

    An optimizer's time for the whole model times this is its time for the transformer layers: an
    update's time goes by parameters.
    """
    layers = model.num_layers * model.parameters(LayerKind.TRANSFORMER, tp)
    ends = model.parameters(LayerKind.EMBEDDING, tp) + model.parameters(LayerKind.HEAD, tp)
    return layers / (layers + ends)
