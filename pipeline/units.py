"""Numbers as people write them: 320k tokens, 5.2×10¹³ FLOPs, 5.2 GiB, 3h12."""

import math
import re
from typing import Any

_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def count(x: float) -> str:
    """Parameters and tokens: 210k, 1.3M, 26B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(x) >= 0.9995 * size:  # 999,600 rounds to 1M, not to 1e+03k
            return f"{float(f'{x / size:.3g}'):g}{unit}"
    return f"{x:.3g}"


def parse_count(text: str) -> float:
    """Parse a number in the form of `count`, such as 1.3b; return 0 for any other text."""
    found = re.fullmatch(r"(\d*\.?\d+)([kmbt])", text.lower())
    return float(found[1]) * 1000 ** ("kmbt".index(found[2]) + 1) if found else 0.0


def byte_size(count: int) -> str:
    """Memory and disk space: 5.2 GiB, 310.0 MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def power(x: float) -> str:
    """FLOPs: 5.2×10¹³."""
    if not (x > 0 and math.isfinite(x)):
        return str(x)
    lead, exponent = f"{x:.1e}".split("e")
    return f"{lead}×10{str(int(exponent)).translate(_RAISED)}"


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def span(seconds: float | None) -> str:
    """A duration: 45s, 12m05, 3h12, 2d03."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}"
