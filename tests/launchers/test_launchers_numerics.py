"""Kinds that compute right pass the check, wrong ones are refused and named; files, the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
    load_numerics,
    merge_numerics,
    numerics_faults,
    save_numerics,
)
from hetplan.launchers.numerics_work import (
    compute_numerics,
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
    "native_layer_norm_backward": "transformer layer",
    "embedding_dense_backward": "embedding layer",
    "log": "head layer",
    "lerp_": "optimizer",
    "addcdiv_": "optimizer",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kind_with_a_wrong_operator_is_refused_and_named(name: str) -> None:
    wrong = faulty(name, lambda value: value * 1.01)
    faults = numerics_faults(computed(result(), CPU | wrong))
    assert any(line.startswith(f"acme-one: {FAULTS[name]} (") for line in faults)
    assert not any(line.startswith("cpu:") for line in faults)


def test_products_of_rounded_inputs_are_no_float32() -> None:
    """What TensorFloat-32 does: inputs of a float32 product keep 11 significant bits."""

    def cut(value: torch.Tensor) -> torch.Tensor:
        return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    faults = numerics_faults(computed(result(), faulty("mm", inputs=cut)))
    assert any(line.startswith("acme-one: transformer layer (") for line in faults)


def test_one_value_that_is_no_number_is_refused() -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.view(-1)[-1] = float("nan")
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
