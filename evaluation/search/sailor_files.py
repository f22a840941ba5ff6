"""What do Sailor's files say of layers, memory and links?

Read are, of a folder of reference data, files of github.com/eth-easl/sailor:

    sailor/layer_profiles/all_models_profiles_tmp.json   what its simulator reads:
        {model: {GPU: {mbs: {tp: {layer: [forward, backward, update]}}}}}
    sailor/memory/llm_info.json                    {model: {tp: {layer: floats by what they are}}}
    sailor/network/multizone_bandwidths_het.json   {zone: {GPU: {GPUs: {zone: {GPU: {GPUs: fit}}}}}}

A fit is `[[a, b, c], most]`: a L^2 + b L + c GB/s with L = log2(bytes / 1e6).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.errors import Fault, InputError

FOLDER = Path("sailor")
NETWORK = FOLDER / "network" / "multizone_bandwidths_het.json"
MEMORY = FOLDER / "memory" / "llm_info.json"
PROFILES = FOLDER / "layer_profiles" / "all_models_profiles_tmp.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One model on one GPU under one (microbatch size, tp): seconds by layer."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """One model under one tp: floats of one rank by layer, activations of one sequence."""

    parameters: tuple[float, ...]
    output_activations: tuple[float, ...]
    kept_activations: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bandwidth of a path by message size."""

    a: float
    b: float
    c: float

    def seconds(self, size_bytes: float) -> float:
        """Of one message; an InputError where the parabola is not above zero.

        sailor/providers/gcp/model_networking.py: get_time_on_config.
        """
        exponent = math.log2(size_bytes / 1e6)
        rate = self.a * exponent**2 + self.b * exponent + self.c
        if rate <= 0:
            raise InputError(
                f"Sailor's fit gives {rate:.3g} GB/s for a message of {size_bytes:.0f} bytes: it "
                "charges nothing for that"
            )
        return size_bytes / 1e9 / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SailorFiles:
    """Everything that one model's plans are scored by."""

    model: str
    num_layers: int
    """With embedding and head."""
    times: dict[tuple[str, int, int], LayerTimes]
    """By (GPU, microbatch size, tp); what is not there was not profiled."""
    sizes: dict[int, LayerSizes]
    """By tp."""
    fits: dict[tuple[str, str, int, str, str, int], Fit]
    """By (zone, GPU, GPUs) of the sender, then of the receiver."""

    def fit(self, sender: tuple[str, str, int], receiver: tuple[str, str, int]) -> Fit:
        """Of one path; an InputError where Sailor's files have none."""
        found = self.fits.get((*sender, *receiver))
        if found is None:
            raise InputError(f"{NETWORK} has no path from {sender} to {receiver}")
        return found


def read_sailor(
    reference: Path, model: str, gpus: tuple[str, ...], zones: tuple[str, ...]
) -> SailorFiles:
    """The files of a model on these GPUs in these zones; an InputError for what is missing."""
    times: dict[tuple[str, int, int], LayerTimes] = {}
    path = reference / PROFILES
    by_gpu = _entry(path, _json(path), model, "model")
    for gpu in gpus:
        for size, by_tp in _mapping(path, _entry(path, by_gpu, gpu, "GPU")).items():
            for tp, layers in _mapping(path, by_tp).items():
                times[gpu, int(size), int(tp)] = _times(path, layers)
    counts = {len(each.forward_seconds) for each in times.values()}
    if len(counts) != 1:
        found = ", ".join(str(count) for count in sorted(counts))
        raise InputError(f"the profiles of {model} have {found} layers; they must agree")
    (num_layers,) = counts
    path = reference / MEMORY
    by_tp = _mapping(path, _entry(path, _json(path), model, "model"))
    sizes = {int(tp): _sizes(path, layers, num_layers) for tp, layers in by_tp.items()}
    return SailorFiles(
        model=model,
        num_layers=num_layers,
        times=times,
        sizes=sizes,
        fits=_fits(reference / NETWORK, gpus, zones),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(Fault(file=str(path), message="there is no such file")) from None
    except (OSError, ValueError) as error:
        raise InputError(Fault(file=str(path), message=f"cannot be read: {error}")) from None


def _mapping(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise InputError(Fault(file=str(path), message="a mapping that is not empty is expected"))
    return value


def _entry(path: Path, value: Any, name: str, what: str) -> Any:
    entries = _mapping(path, value)
    if name not in entries:
        known = ", ".join(entries)
        raise InputError(
            Fault(file=str(path), message=f"there is no {what} {name}; there are {known}")
        )
    return entries[name]


def _times(path: Path, layers: Any) -> LayerTimes:
    # In the order of the file, as Sailor reads them.
    rows = list(_mapping(path, layers).values())
    if any(not isinstance(row, list) or len(row) < 3 for row in rows):
        raise InputError(
            Fault(file=str(path), message="a layer has no [forward, backward, update] seconds")
        )
    forward, backward, update = (tuple(float(row[at]) for row in rows) for at in range(3))
    return LayerTimes(forward_seconds=forward, backward_seconds=backward, update_seconds=update)


def _sizes(path: Path, layers: Any, num_layers: int) -> LayerSizes:
    try:
        rows = [layers[str(layer)] for layer in range(num_layers)]
        return LayerSizes(
            parameters=tuple(float(row["params_floats"]) for row in rows),
            output_activations=tuple(float(row["act_output_floats"]) for row in rows),
            kept_activations=tuple(float(row["act_mem_floats"]) for row in rows),
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"a layer's floats are not there: {error}"
        raise InputError(Fault(file=str(path), message=message)) from None


def _fits(
    path: Path, gpus: tuple[str, ...], zones: tuple[str, ...]
) -> dict[tuple[str, str, int, str, str, int], Fit]:
    root = _mapping(path, _json(path))
    found = {}
    for zone in zones:
        for gpu in gpus:
            for count, to_zones in root.get(zone, {}).get(gpu, {}).items():
                for to_zone in zones:
                    for to_gpu in gpus:
                        for to_count, fit in to_zones.get(to_zone, {}).get(to_gpu, {}).items():
                            (a, b, c), _ = fit
                            key = (zone, gpu, int(count), to_zone, to_gpu, int(to_count))
                            found[key] = Fit(a=float(a), b=float(b), c=float(c))
    return found
