"""Kinds that compute right pass the check, wrong ones are refused and named; files, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_results import result_of
from runtime_cases import CPUS, GPT, LLAMA, cluster, island, job, plan_of
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.launchers import numerics_work
from hetplan.launchers.numerics import (
    Numerics,
    NumericsResult,
    Refused,
    Roundings,
    load_numerics,
    merge_numerics,
    numerics_faults,
    save_numerics,
)
from hetplan.launchers.numerics_work import (
    check_plan_numerics,
    compute_numerics,
    kinds_here,
    kinds_of_plan,
    numerics_setup,
    work_of,
)
from hetplan.model.spec import ModelSpec
from hetplan.profiling.backends import CpuBackend
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult

Change = Callable[[torch.Tensor], torch.Tensor]
MIXED = cluster(island("a", "cpu", 2), island("b", "acme-one", 2))


class Faulty(TorchDispatchMode):
    """A device whose calls of this name give something else; float64 is the reference's."""

    def __init__(self, name: str, change: Change, inputs: Change | None) -> None:
        super().__init__()
        self._name, self._change, self._inputs = name, change, inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meant = func.overloadpacket.__name__ == self._name
        if meant and self._inputs is not None:
            exact = [each.dtype == torch.float64 for each in args]
            args = args if any(exact) else tuple(self._inputs(each) for each in args)
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if not meant or first.dtype == torch.float64:
            return result
        changed = self._change(first)
        if self._name.endswith("_"):
            return first.copy_(changed)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed


class FaultyBackend(CpuBackend):
    """This machine's cores with one wrong operator."""

    def __init__(self, name: str, change: Change, inputs: Change | None) -> None:
        super().__init__()
        self.fault = Faulty(name, change, inputs)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _with_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_on = numerics_work.compute_on

    def with_fault(backend: Any, dtype: Any, compute: Any) -> Any:
        with getattr(backend, "fault", None) or nullcontext():
            return compute_on(backend, dtype, compute)

    monkeypatch.setattr(numerics_work, "compute_on", with_fault)


def result(
    model: ModelSpec = GPT, precision: Precision = Precision.FLOAT32, **changes: Any
) -> SearchResult:
    tp = changes.pop("tp", 1)
    task = job(precision=precision, **changes)
    return result_of(model, CPUS, task, plan_of(model, task, (2, 2), tp=tp))


CPU = {"cpu": CpuBackend()}


def faulty(
    name: str, change: Change = lambda value: value, inputs: Change | None = None
) -> dict[str, CpuBackend]:
    return {"acme-one": FaultyBackend(name, change, inputs)}


def computed(of: SearchResult, backends: dict[str, CpuBackend]) -> Numerics:
    return compute_numerics(of, numerics_setup(of), backends)


@pytest.fixture(scope="module")
def found() -> Numerics:
    """Results of this machine's cores."""
    return computed(result(), CPU)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_this_machines_cores_are_as_exact_as_their_format(
    model: ModelSpec, precision: Precision
) -> None:
    of = result(model, precision, tp=2)
    numerics = computed(of, CPU)
    assert numerics_faults(numerics, work_of(numerics.setup)) == ()
    (kind,) = numerics.kinds
    # Layers are far from the bound; all are compared with something else than themselves.
    assert max(each.share for each in kind.results if each.operator != "optimizer") < 0.6
    assert sum(each.largest_deviation > 0 for each in kind.results) > 0.7 * len(kind.results)
    layer = {each.tensor: each.shape for each in kind.results if "transformer" in each.operator}
    assert layer["gradient of up_weight"][0] == model.ffn_hidden_size // 2
    sgd = computed(result(optimizer=Optimizer.SGD), CPU)
    assert numerics_faults(sgd, work_of(sgd.setup)) == ()


FAULTS = {
    "addmm": "transformer layer",
    "_scaled_dot_product_flash_attention_for_cpu": "transformer layer",
    "native_layer_norm": "transformer layer",
    "gelu": "transformer layer",
    "native_layer_norm_backward": "transformer layer",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "transformer layer",
    "gelu_backward": "transformer layer",
    "embedding_dense_backward": "embedding layer",
    "log": "head layer",
    "lerp_": "optimizer",
    "mul_": "optimizer",
    "addcmul_": "optimizer",
    "addcdiv_": "optimizer",
    "sqrt": "optimizer",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kind_with_a_wrong_operator_is_refused_and_named(name: str) -> None:
    wrong = faulty(name, lambda value: value * 1.01)
    faults = numerics_faults(computed(result(), CPU | wrong))
    assert any(line.startswith(f"acme-one: {FAULTS[name]} (") for line in faults)
    assert not any(line.startswith("cpu:") for line in faults)


def test_a_wrong_operator_shows_in_bfloat16_too() -> None:
    wrong = faulty("gelu", lambda value: value * 1.3)
    faults = numerics_faults(computed(result(precision=Precision.BFLOAT16), CPU | wrong))
    assert any(line.startswith("acme-one: transformer layer (") for line in faults)


def test_products_of_rounded_inputs_are_no_float32() -> None:
    """What TensorFloat-32 does: inputs of a float32 product keep 11 significant bits."""

    def cut(value: torch.Tensor) -> torch.Tensor:
        return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    faults = numerics_faults(computed(result(), faulty("mm", inputs=cut)))
    assert any(line.startswith("acme-one: transformer layer (") for line in faults)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_value_that_is_no_number_is_refused(bad: float) -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.view(-1)[-1] = bad
        return value

    faults = numerics_faults(computed(result(), faulty("gelu_backward", change)))
    assert any("values that are no finite numbers" in line for line in faults)


def test_a_kind_that_lacks_an_operator_is_refused() -> None:
    def refuse(value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this\nand a long trace")

    numerics = computed(result(), faulty("gelu", refuse))
    refused = Refused(operator="transformer layer", what="whole", message="no kernel for this")
    assert refused in numerics.kinds[0].refused
    assert "acme-one: transformer layer (whole): no kernel for this" in numerics_faults(numerics)


# ---- the bound


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 400), seed=st.integers(0, 2**32))
def test_correct_sums_are_within_the_bound_and_sums_in_half_precision_are_not(
    length: int, seed: int
) -> None:
    def shares(count: int, dtype: type, precision: Precision, roundings: Roundings) -> list[float]:
        draw = np.random.default_rng(seed)
        x, y = (draw.standard_normal((count, 200)).astype(dtype) for _ in range(2))
        total = np.zeros(200, dtype=dtype)
        for row in range(count):
            total = (total + (x[row] * y[row]).astype(dtype)).astype(dtype)
        exact = (x.astype(np.float64) * y.astype(np.float64)).sum(axis=0)
        rms = math.sqrt(float(np.square(exact).mean()))
        peak = float(np.abs(exact).max()) / rms
        bound = roundings.allowed(precision, elements=200, peak=peak, rms=rms)
        apart = np.abs(total.astype(np.float64) - exact) / rms
        return [math.sqrt(float(np.square(apart).mean())) / bound.rms, apart.max() / bound.largest]

    single = Roundings(inner=1.0, length=length)
    assert max(shares(length, np.float32, Precision.FLOAT32, single)) < 1
    half = Roundings(stored=1.0, length=1024)
    assert shares(1024, np.float16, Precision.FLOAT16, half)[0] > 1


def test_the_last_bit_of_a_tolerance_is_allowed_and_the_next_is_not(found: Numerics) -> None:
    (own,) = found.kinds
    first = own.results[0]
    for name in ("rms", "largest"):
        bound = getattr(first.allowed, name)
        for value, refused in ((bound, False), (math.nextafter(bound, 9.0), True)):
            changed = replace(first, **{f"{name}_deviation": value})
            kind = replace(own, results=(changed,))
            assert bool(numerics_faults(replace(found, kinds=(kind,)))) is refused


# ---- several machines


def other_kind(
    found: Numerics, change: Callable[[NumericsResult], NumericsResult | None] = lambda r: r
) -> Numerics:
    """The same results under another kind's name; one that becomes None is left out."""
    (own,) = found.kinds
    results = tuple(new for each in own.results if (new := change(each)) is not None)
    return replace(found, kinds=(replace(own, kind="acme-one", results=results),))


def merged(found: Numerics, other: Numerics) -> Numerics:
    return merge_numerics(found, [(Path("a.json"), other)])


def test_kinds_that_differ_more_than_both_may_deviate_are_refused(found: Numerics) -> None:
    assert numerics_faults(merged(found, other_kind(found))) == ()

    def off(each: NumericsResult) -> NumericsResult:
        by = 2.7 * each.allowed.largest * each.reference_rms
        return replace(each, probes=tuple(probe + by for probe in each.probes))

    faults = numerics_faults(merged(found, other_kind(found, off)))
    assert len(faults) == len({each.operator for each in found.kinds[0].results})
    assert all(line.startswith("cpu and acme-one: ") and "differs by" in line for line in faults)


def test_a_check_without_some_work_is_no_whole_check(found: Numerics) -> None:
    def without_optimizer(each: NumericsResult) -> NumericsResult | None:
        return None if each.operator == "optimizer" else each

    both = merged(found, other_kind(found, without_optimizer))
    faults = numerics_faults(both, work_of(found.setup))
    assert faults == ("acme-one: no result of optimizer (adamw step, tp 1), or not all",)
    assert numerics_faults(both) == faults, "the other kind's results say so too"


def test_results_of_other_machines_must_be_of_the_same_work(
    found: Numerics, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    save_numerics(found, path)
    assert load_numerics(path, found.setup) == found
    with pytest.raises(InputError, match=r"cpu.json:\d+: setup.seed: 3; this check has 4"):
        load_numerics(path, replace(found.setup, seed=4))
    with pytest.raises(InputError, match="as another file or this machine"):
        merged(found, found)
    with pytest.raises(InputError, match="the inputs differ"):
        merged(found, other_kind(found, lambda each: replace(each, reference_rms=1.5)))
    with pytest.raises(InputError, match="the inputs differ"):
        merged(
            found,
            other_kind(
                found,
                lambda each: replace(each, allowed=replace(each.allowed, largest=1e3)),
            ),
        )


@pytest.mark.parametrize(
    "change",
    [{"probes": ()}, {"largest_deviation": -1.0}, {"reference_rms": -1.0}],
    ids=["no probes", "a negative deviation", "a negative reference"],
)
def test_a_file_whose_results_cannot_be_compared_is_refused(
    found: Numerics, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "acme.json"
    save_numerics(other_kind(found, lambda each: replace(each, **change)), path)
    with pytest.raises(InputError, match=r"acme.json:\d+: kinds\[0\].results\[0\]"):
        load_numerics(path, found.setup)


def test_kinds_are_matched_with_what_this_machine_has() -> None:
    machines = cluster(island("a", "cpu", 2), island("b", "nvidia-h200", 2))
    of = result_of(GPT, machines, job(), plan_of(GPT, job(), (2, 2), machines, "ab"))
    assert kinds_of_plan(of) == ("cpu", "nvidia-h200")
    assert list(kinds_here(("cpu", "no-such-kind"))) == ["cpu"]
    played = kinds_here(("cpu", "slow"), paced=("slow",))
    assert {kind: backend.kind() for kind, backend in played.items()} == {
        "cpu": "cpu",
        "slow": "cpu",
    }


def test_tokens_are_few_enough_for_a_reference_and_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = result()
    assert (numerics_setup(of).microbatch_size, numerics_setup(of).sequence_length) == (1, 16)
    asked = numerics_setup(of, tokens=40)
    assert (asked.microbatch_size, asked.sequence_length) == (2, 16)
    assert numerics_setup(of, tokens=5).sequence_length == 5
    monkeypatch.setattr(numerics_work, "free_memory_bytes", lambda: 1e7)
    with pytest.raises(InputError, match="are free; give fewer --tokens"):
        check_plan_numerics(of, tokens=10**6)
    monkeypatch.setattr(numerics_work, "REFERENCE_FLOPS", 1e6)
    assert numerics_setup(of).sequence_length < 16


# ---- the command


def check(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ("launch", "check-numerics", *map(str, words)))
    return done.exit_code, done.stdout, done.stderr


def test_results_of_two_machines_are_put_together(found: Numerics, tmp_path: Path) -> None:
    plan, file = tmp_path / "plan.json", tmp_path / "results.json"
    save_result(result_of(GPT, MIXED, job(), plan_of(GPT, job(), (2, 2), MIXED, "ab")), plan)
    code, out, err = check(plan, "--out", file, "--json")
    assert (code, out) == (0, file.read_text())
    assert json.loads(out)["schema"] == "hetplan.numerics/1"
    assert "no results of acme-one: run this with --out FILE where they are" in err
    save_numerics(other_kind(load_numerics(file, found.setup)), file)
    code, out, _ = check(plan, "--with", file)
    assert code == 0
    assert "cpu and acme-one: every result is as exact as its number format allows" in out
    far = other_kind(
        found, lambda each: replace(each, probes=tuple(probe + 1.0 for probe in each.probes))
    )
    save_numerics(far, file)
    code, _, err = check(plan, "--with", file)
    assert code == 1
    assert "these kinds must not be mixed" in err
