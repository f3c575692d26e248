import json
import re
from pathlib import Path

import numpy as np

from pipeline.scaling.report import CURVE_POINTS, embed, page_data, render, thin
from pipeline.scaling.runs import read_runs
from tests.scaling.made_runs import make_run

HOSTILE = "</script><script>alert(1)</script>&\u2028"


def embedded(page: str) -> dict:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match[1])


def test_the_page_carries_its_data_and_asks_for_nothing(ladder: Path, launch) -> None:
    out = ladder / "page" / "report.html"
    assert "3 runs" in launch("report", "--runs", ladder, "--out", out)
    page = out.read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:)?//", page)
    data = embedded(page)
    assert [run["size"] for run in data["runs"]] == ["tiny", "mini", "small"]
    assert data["fit"]["law"] == "power"
    assert len(data["fit"]["line"]["C"]) == len(data["fit"]["line"]["high"])
    assert data["runs"][0]["tokens_per_parameter"] == 20


def test_a_hostile_name_stays_text(ladder: Path) -> None:
    make_run(ladder, "x", 3e5, 6e6, name=HOSTILE)
    page = render(page_data(read_runs(ladder), title=HOSTILE, now=0.0))
    assert "<script>alert" not in page
    assert embedded(page)["title"] == HOSTILE


def test_one_run_is_a_page_without_a_law(tmp_path: Path) -> None:
    make_run(tmp_path, "only", 1e5, 2e6)
    data = page_data(read_runs(tmp_path), title="one", now=0.0)
    assert data["fit"]["law"] is None
    assert "two finished runs" in data["fit"]["warnings"][0]


def test_two_runs_have_no_interval_and_say_so(tmp_path: Path) -> None:
    for name, N in (("a", 1e5), ("b", 1e6)):
        make_run(tmp_path, name, N, 20 * N)
    data = embedded(render(page_data(read_runs(tmp_path), title="two", now=0.0)))
    assert data["fit"]["line"]["high"][0] is None
    assert "nothing over to say" in data["fit"]["plain"]


def test_thinning_keeps_the_extremes() -> None:
    x = np.geomspace(1, 1e6, 20000)
    y = np.random.default_rng(0).normal(3, 0.1, x.size)
    y[12345], y[777] = 9.0, 0.5
    kept = thin(x, y)
    assert {0, 777, 12345, 19999} <= set(kept)
    assert len(kept) <= CURVE_POINTS + 2


def test_not_finite_becomes_null() -> None:
    assert json.loads(embed({"a": [float("nan"), float("inf"), 1.0]})) == {"a": [None, None, 1.0]}
