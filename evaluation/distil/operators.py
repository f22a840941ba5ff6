"""What accelerators take for products, attention and norms: `silicon/operators` as samples.

gemm.csv     forward products of random data in bursts (sglang; FP8 and NVFP4: TensorRT-LLM, with
             quantising of the activations). Bursts are no training: their times are multiplied by
             what the same product takes longer when it is kept up (`hetplan.profiling.bursts`).
attention_training.csv   forward and backward of whole kernels, as they are.
attention_forward.csv    kernels of serving, which read a paged cache: their times are divided by
             how much longer they take than training kernels of the same length and no fewer heads
             (`_paged`): the kind's own, those of a board of the same chip, or by `PAGED`. Backward
             passes where only these are: `BACKWARD` times the forward's.
norms.csv    RMSNorm by cuDNN's kernels, forward and backward.

Ascend's rows are left out: their label is in doubt (trap 7). So is moe.csv: its kernels are
serving's, with weights that are no numbers. On B200 they reach 1900 TFLOP/s where Transformer
Engine's grouped products of training stay below 1115 (SimuMax).

Every other trap of the folder's README is obeyed by leaving rows out: marked rows, other
conditions, less than 256 rows (nobody trains so), kernels with a window or deterministic sums. What
is left is thinned to as many shapes as a law needs, evenly by the operations they do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.accuracy.unit_data import MICROSECOND, Notes, Row, each_row, population, read_rows
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.kinds.operators import same_chip
from hetplan.profiling.bursts import sustained_factor
from hetplan.profiling.samples import OperatorPhase, OperatorSample, ProfileSet

KINDS: Mapping[str, str] = {
    "A100": "nvidia-a100-80gb-sxm",
    "A100-PCIe": "nvidia-a100-80gb-pcie",
    "H100": "nvidia-h100-80gb-sxm",
    "H200": "nvidia-h200-141gb-sxm",
    "B200": "nvidia-b200-180gb-sxm",
    "B300": "nvidia-b300-288gb-sxm",
    "GB200": "nvidia-gb200-186gb",
    "GB300": "nvidia-gb300-279gb",
    "L40S": "nvidia-l40s",
    "RTX-PRO-6000": "nvidia-rtx-pro-6000-96gb",
    "B60": "intel-arc-pro-b60-24gb",
}
"""Labels of the tables and kinds of the catalogue."""

FORMATS: Mapping[str, str] = {
    "bf16": Precision.BFLOAT16.value,
    "fp8": ProductFormat.FLOAT8.value,
    "nvfp4": ProductFormat.NVFP4.value,
}
PAGED = 1.15
"""Serving's attention over training's (README: 6 to 20 % slower), where a kind has no pair."""
BACKWARD = 3.05
"""Backward over forward of attention: middle of six kinds' training kernels (2.7 to 3.8)."""
MIN_ROWS = 256
MIN_ATTENTION = 2.5e10
"""Multiply-adds of the full square: smaller launches are of serving."""
MAX_SHAPES = 240

_FORWARD, _BACKWARD = OperatorPhase.FORWARD.value, OperatorPhase.BACKWARD.value


def read_operators(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per kind; `folder` holds `operators/`."""
    samples = [
        *_products(folder / "operators" / "gemm.csv", notes),
        *_attention(folder / "operators", notes),
        *_norms(folder / "operators" / "norms.csv", notes),
    ]
    return tuple(
        population(
            kind,
            label,
            tool="aiconfigurator, cudnn-frontend",
            file="silicon/operators",
            operators=[each for each in samples if each.device == kind],
            words="Others' measurements (aiconfigurator 095f58a, Apache-2.0; cudnn-frontend "
            "3929da2e, MIT; tritonbench, BSD-3-Clause), thinned. Products: forward, bursts "
            "times sustained over burst, by operations of a launch; float8 and nvfp4 with "
            "quantising of their activations. Attention causal, in shapes of the full square. "
            "Made by `python -m evaluation distil`.",
        )
        for label, kind in KINDS.items()
        if any(each.device == kind for each in samples)
    )


def _sample(row_kind: str, operator: OperatorClass, phase: str, **sizes: object) -> OperatorSample:
    seconds = float(sizes.pop("seconds"))  # type: ignore[arg-type]
    precision = str(sizes.pop("precision", Precision.BFLOAT16.value))
    return OperatorSample(
        device=row_kind,
        operator=operator.value,
        phase=phase,
        precision=precision,
        output_precision=Precision.BFLOAT16.value,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=6,
        outliers=0,
        **sizes,  # type: ignore[arg-type]
    )


def _products(path: Path, notes: Notes) -> Iterator[OperatorSample]:
    table = read_rows(
        path,
        notes,
        words=("gpu", "dtype", "condition", "flag"),
        needed=("m", "n", "k", "time_us"),
    )
    found: dict[tuple[str, str], list[OperatorSample]] = {}
    for row in each_row(table):
        kind, precision = KINDS.get(row.gpu), FORMATS.get(row.dtype)
        if kind is None or precision is None or row.flag or row.condition != "burst":
            notes.unused["gemm.csv: another kind, format or condition, or marked"] += 1
        elif min(row.m, row.n, row.k) < MIN_ROWS or row.m % MIN_ROWS:
            notes.unused[f"gemm.csv: a size below or beside multiples of {MIN_ROWS}"] += 1
        else:
            found.setdefault((kind, precision), []).append(
                _sample(
                    kind,
                    OperatorClass.MATRIX_PRODUCT,
                    _FORWARD,
                    precision=precision,
                    batch=1,
                    m=int(row.m),
                    n=int(row.n),
                    k=int(row.k),
                    seconds=row.time_us * MICROSECOND,
                )
            )
    for (kind, precision), samples in found.items():
        for each in _thinned(samples):
            factor = sustained_factor(kind, precision, 2.0 * each.m * each.n * each.k)
            yield _times(each, factor)


def _thinned(samples: Sequence[OperatorSample], most: int = MAX_SHAPES) -> list[OperatorSample]:
    """Evenly many of all by the operations they do, ties in the order of their sizes."""
    ordered = sorted(
        samples, key=lambda each: (each.batch * each.m * each.n * max(each.k, 1), each.shape)
    )
    step = max(1.0, len(ordered) / most)
    return [ordered[int(at * step)] for at in range(int(len(ordered) / step))]


def _attention(folder: Path, notes: Notes) -> Iterator[OperatorSample]:
    training = list(_training_attention(folder / "attention_training.csv", notes))
    with_backward = {each.device for each in training}
    yield from training
    serving: dict[str, list[OperatorSample]] = {}
    for each in _serving_attention(folder / "attention_forward.csv", notes):
        serving.setdefault(each.device, []).append(each)
    plain = [each for each in training if each.phase == _FORWARD]
    known = {kind: _paged(samples, plain) for kind, samples in serving.items()}
    kinds = known_kinds()
    for kind, samples in serving.items():
        near = [
            known[kind],
            *(known[each] for each in known if same_chip(kinds[each], kinds[kind])),
        ]
        ratio = next((each for each in near if each is not None), PAGED)
        for each in _thinned(samples, MAX_SHAPES // 3):
            forward = _times(each, 1.0 / ratio)
            yield forward
            if kind not in with_backward:
                yield replace(_times(forward, BACKWARD), phase=_BACKWARD)


def _paged(serving: Sequence[OperatorSample], training: Sequence[OperatorSample]) -> float | None:
    """Serving's over training's time of an operation, median over training's launches; None where
    the kind has none of these.

    Small launches fill no device, so serving's have at least as many heads of the same length.
    """
    ratios = []
    for one in training:
        alike = [
            _rate(each)
            for each in serving
            if (each.device, each.m, each.k) == (one.device, one.m, one.k)
            and each.batch >= one.batch
        ]
        if alike:
            ratios.append(_rate(one) / statistics.median(alike))
    return statistics.median(ratios) if ratios else None


def _rate(sample: OperatorSample) -> float:
    return sample.batch * sample.m * sample.n * sample.k / sample.median_seconds


def _times(sample: OperatorSample, factor: float) -> OperatorSample:
    seconds = sample.median_seconds * factor
    return replace(sample, median_seconds=seconds, p10_seconds=seconds, p90_seconds=seconds)


def _training_attention(path: Path, notes: Notes) -> Iterator[OperatorSample]:
    """The kind's fastest library, as trainers choose among them, forward and backward."""
    table = read_rows(
        path,
        notes,
        words=("gpu", "library", "dtype", "pass"),
        needed=(
            *("causal", "window", "deterministic", "batch", "seq", "heads"),
            *("head_dim_qk", "head_dim_v", "time_us"),
        ),
    ).rename(columns={"pass": "phase"})
    best: dict[tuple[object, ...], OperatorSample] = {}
    for row in each_row(table):
        kind = KINDS.get(row.gpu)
        unlike = row.window or row.deterministic or not row.causal or row.dtype != "bf16"
        if kind is None or unlike or row.head_dim_qk != row.head_dim_v:
            notes.unused["attention_training.csv: window, deterministic, not causal, FP8"] += 1
            continue
        sample = _square(kind, row, row.phase, row.head_dim_qk)
        key = (kind, sample.phase, sample.shape)
        if key not in best or sample.median_seconds < best[key].median_seconds:
            best[key] = sample
    yield from best.values()


def _serving_attention(path: Path, notes: Notes) -> Iterator[OperatorSample]:
    table = read_rows(
        path,
        notes,
        words=("gpu", "dtype", "condition", "flag"),
        needed=("causal", "batch", "seq", "heads", "head_dim", "time_us"),
    )
    once: dict[tuple[object, ...], OperatorSample] = {}
    for row in each_row(table):
        kind = KINDS.get(row.gpu)
        usable = row.causal and row.dtype == "bf16" and row.condition == "burst" and not row.flag
        work = row.batch * row.heads * row.seq**2 * row.head_dim
        if kind is None or not usable or work < MIN_ATTENTION or row.head_dim not in (64, 128):
            notes.unused["attention_forward.csv: small, not causal, or of another kind"] += 1
            continue
        sample = _square(kind, row, _FORWARD, row.head_dim)
        once.setdefault((kind, sample.shape), sample)
    yield from once.values()


def _square(kind: str, row: Row, phase: str, width: float) -> OperatorSample:
    return _sample(
        kind,
        OperatorClass.FUSED_ATTENTION,
        phase,
        batch=int(row.batch * row.heads),
        m=int(row.seq),
        n=int(row.seq),
        k=int(width),
        seconds=row.time_us * MICROSECOND,
    )


def _norms(path: Path, notes: Notes) -> Iterator[OperatorSample]:
    table = read_rows(
        path,
        notes,
        words=("gpu", "norm", "library", "dtype", "pass"),
        needed=("tokens", "hidden", "time_us"),
    ).rename(columns={"pass": "phase"})
    for row in each_row(table):
        kind = KINDS.get(row.gpu)
        if kind is None or (row.norm, row.library, row.dtype) != ("rms_norm", "cudnn", "bf16"):
            notes.unused["norms.csv: another library or norm"] += 1
            continue
        yield _sample(
            kind,
            OperatorClass.NORM,
            row.phase,
            batch=1,
            m=int(row.tokens),
            n=int(row.hidden),
            k=0,
            seconds=row.time_us * MICROSECOND,
        )
