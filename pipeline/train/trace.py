"""The kernels of a step, and the pauses between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.parallel.world import World


def traced(step: Callable[[], object], device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        step()
    return trace


def kernels(step: Callable[[], object], world: World, path: Path) -> str:
    """The first rank's kernels of a step by their own time, and where its device had nothing to do, in a file."""
    trace, cuda = traced(step, world.device), world.device.type == "cuda"
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    table = trace.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=100)
    if world.first:
        path.write_text(table + _gaps(trace))
    return str(path)


def _gaps(trace: Any) -> str:
    """Pauses between kernels, the longest first; nothing of a CPU, whose operations lie inside each other."""
    ran = [e for e in trace.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    ended, last, gaps = 0.0, "", list[tuple[float, str]]()
    for kernel in sorted(ran, key=lambda e: e.time_range.start):
        if last and kernel.time_range.start > ended:
            gaps.append((kernel.time_range.start - ended, f"{last[:60]} → {kernel.name[:60]}"))
        if kernel.time_range.end > ended:
            ended, last = kernel.time_range.end, kernel.name
    lines = [f"{pause / 1e3:10.3f} ms  {between}" for pause, between in sorted(gaps, reverse=True)[:20]]
    total = f"idle between {len(ran)} kernels: {sum(pause for pause, _ in gaps) / 1e3:.2f} ms"
    return "\n".join([total, *lines, ""]) if ran else ""
