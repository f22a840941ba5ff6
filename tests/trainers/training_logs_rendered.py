"""Logs written by hand from the format strings of the trainers, to be read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def megatron_line(
    iteration: int,
    milliseconds: float,
    *,
    batch: int = 256,
    skipped: int = 0,
    stamp: str = " [2026-01-02 03:04:05]",
) -> str:
    """megatron/training/training.py, training_log (2024)."""
    return (
        f"{stamp} iteration {iteration:8d}/{1000:8d} | consumed samples: {iteration * batch:12d} | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): {180.0:.1f} | learning rate: {1e-4:.6E} | "
        f"global batch size: {batch:5d} | lm loss: {9.1:.6E} | loss scale: {1.0:.1f} | "
        f"grad norm: {1.2:.3f} | number of skipped iterations: {skipped:3d} | "
        f"number of nan iterations: {0:3d} |"
    )


def megatron_timers(
    timers: Mapping[str, tuple[float, float] | Sequence[float]], form: str = "minmax"
) -> str:
    """megatron/core/timers.py; milliseconds, (min, max) or one per rank."""
    if form == "all":
        lines = ["times across ranks (ms):"]
        for name, values in timers.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values)]
        return "\n".join(lines)
    if form == "max":
        rows = [
            f"    {(name + ' ').ljust(48, '.')}: {max(values):.2f}"
            for name, values in timers.items()
        ]
        return "\n".join(["max time across ranks (ms):", *rows])
    if form == "line":
        parts = [f"{name}: {max(values):.2f}" for name, values in timers.items()]
        return " | ".join(["time (ms)", *parts])
    rows = [
        f"    {(name + ' ').ljust(48, '.')}: ({min(values):.2f}, {max(values):.2f})"
        for name, values in timers.items()
    ]
    return "\n".join(["(min, max) time across ranks (ms):", *rows])


def megatron_arguments(**settings: object) -> str:
    """megatron/training/arguments.py, _print_args."""
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in settings.items()]
    return "\n".join(["------------------------ arguments ------------------------", *rows])


def torchtitan_line(step: int, tps: float, *, memory: float = 48.91, colours: bool = True) -> str:
    """torchtitan/components/metrics.py, MetricsProcessor.log (2025)."""
    red, green, orange, turquoise, blue, cyan, magenta, reset = (
        ("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[38;2;54;234;195m", "\x1b[34m",
         "\x1b[36m", "\x1b[35m", "\x1b[39m")
        if colours
        else [""] * 8
    )  # fmt: skip
    return (
        f"[titan] 2026-01-29 10:15:45,267 - root - INFO - {red}step: {step:2}  "
        f"{green}loss: {9.3421:7.4f}  {orange}grad_norm: {1.2:7.4f}  "
        f"{turquoise}memory: {memory:5.2f}GiB({51.52:.2f}%)  {blue}tps: {round(tps):,}  "
        f"{cyan}tflops: {123.4:,.2f}  {magenta}mfu: {39.5:.2f}%{reset}"
    )


def nemo_line(step: int, seconds: float, batch: int = 128) -> str:
    """nemo/lightning/pytorch/callbacks/progress_printer.py."""
    return (
        f"Training epoch 0, iteration {step}/99 | lr: 1e-05 | global_batch_size: {batch} | "
        f"global_step: {step} | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | "
        f"reduced_train_loss: 11.96 | train_step_timing in s: {seconds:.4g} | "
        f"consumed_samples: {batch * (step + 1)}"
    )
