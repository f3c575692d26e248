"""The kernels of a step, and the pauses between them."""

from collections.abc import Callable
from typing import Any

import torch


def traced(step: Callable[[], object], device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        step()
    return trace


def kernels(step: Callable[[], object], device: torch.device) -> str:
    """A step's kernels by their own time, and where the device had nothing to do."""
    trace, by = (
        traced(step, device),
        "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total",
    )
    table = trace.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=100)
    return f"\n{table}{_gaps(trace)}"


def _gaps(trace: Any) -> str:
    """Pauses between kernels, the longest first; nothing of a CPU, whose operations lie inside each other."""
    ran = [e for e in trace.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    ended, last, gaps = 0.0, "", list[tuple[float, str]]()
    for kernel in sorted(ran, key=lambda e: e.time_range.start):
        if last and kernel.time_range.start > ended:
            gaps.append((kernel.time_range.start - ended, f"{last[:60]} → {kernel.name[:60]}"))
        if kernel.time_range.end > ended:
            ended, last = kernel.time_range.end, kernel.name
    lines = [
        f"{pause / 1e3:10.3f} ms  {between}" for pause, between in sorted(gaps, reverse=True)[:20]
    ]
    total = f"idle between {len(ran)} kernels: {sum(pause for pause, _ in gaps) / 1e3:.2f} ms"
    return "\n".join([total, *lines, ""]) if ran else ""
