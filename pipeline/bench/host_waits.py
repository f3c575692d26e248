"""Where a host waits for its device: counted on a GPU by torch's warnings, on a CPU by what would make it wait."""

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "bincount",
    "_unique2",
}
_CALLS = {"tolist", "cpu", "numpy"}  # which are no operations where the device is the host


def reads(update: Callable[[], object], device: torch.device) -> str:
    """How often and where the host waits for a number of its device, beside the loop's reading of the step before."""
    places: list[str] = []
    with _waits(places):
        if device.type == "cuda":
            with warnings.catch_warnings(record=True) as caught:
                torch.cuda.set_sync_debug_mode("warn")
                caught.clear()  # that this is a prototype
                warnings.simplefilter("always")
                try:
                    update()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            places += [
                f"{Path(w.filename).name}:{w.lineno}"
                for w in caught
                if "synchroniz" in str(w.message)
            ]
        else:
            with Operations(places), Calls(places):
                update()
    places = [place for place in places if not place.startswith("reading.py:")]
    where = ", ".join(f"{place} ×{n}" for place, n in Counter(places).items())
    return f"{len(places)}: {where}" if places else "0"


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where a host would wait for its device, also where both are one."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _READS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _CALLS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


@contextmanager
def _waits(places: list[str]) -> Iterator[None]:
    """Where DeepSpeed waits for the whole device, of which torch does not warn."""
    if (loaded := sys.modules.get("deepspeed.accelerator")) is None:
        yield
        return
    accelerator: Any = loaded.get_accelerator()
    accelerator.synchronize = lambda *_: places.append(_place())
    try:
        yield
    finally:
        del accelerator.synchronize


def _place() -> str:
    frames = [
        f
        for f in traceback.extract_stack()
        if "/torch/" not in f.filename and f.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}"
