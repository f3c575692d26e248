"""What the server answers, and whom it refuses."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.dashboard.live import Directories, Watcher
from tests.dashboard.served import serving
from tests.scaling.made_runs import make_ladder, make_run

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ladder(tmp_path_factory.mktemp("server") / "demo")


@pytest.fixture(scope="module")
def local(runs: Path) -> Iterator[tuple[int, Watcher]]:
    with serving(Directories(runs)) as served:
        yield served


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = link.getresponse()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def test_only_its_own_host_and_origin_are_served(local) -> None:
    port, _ = local
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "",
        "localhost@evil",
        "[::1",
    ):
        assert ask(port, "/api/runs", Host=host)[0] in (400, 403), host
    for host in (
        f"localhost:{port}",
        "127.0.0.1:9999",
        "[::1]:80",
    ):  # a tunnel may have another port
        assert ask(port, "/api/runs", Host=host)[0] == 200, host
    assert ask(port, "/", Origin="http://evil.example")[0] == 403
    assert ask(port, "/api/runs", Origin="null")[0] == 403
    assert ask(port, "/api/runs", Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_every_answer_carries_the_policy_and_nothing_is_written(local) -> None:
    port, _ = local
    for path in (
        "/",
        "/page/app.js",
        "/api/runs",
        "/api/laws",
        "/nothing",
        "/api/runs/ffffffffffff",
    ):
        _, headers, _ = ask(port, path)
        assert "script-src 'self';" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(port, path, method)[0] in (404, 405), (method, path)
    page = ask(port, "/")[2].decode()
    assert "<script>" not in page and "onclick" not in page and "https:" not in page
    refused = ask(port, "/", Host="evil.example")[1]
    assert "default-src 'none'" in refused["content-security-policy"]


def test_no_path_reaches_the_file_system(local, runs: Path) -> None:
    port, _ = local
    for path in ("../../pyproject.toml", "%2e%2e%2fserver.py", "..%5cserver.py", "page.html", "/etc/passwd", "%00",
                 "files.py", ".", "..", "app.js%00.css", str(runs / "tiny-20x" / "run.json")):  # fmt: skip
        status, _, body = ask(port, f"/page/{path}")
        assert status in (400, 404), path
        assert b"isoflop" not in body and b"root:" not in body
    for key in ("../tiny-20x", "tiny-20x", "%2e%2e", "0" * 12, "a" * 5000):
        assert ask(port, f"/api/runs/{key}")[0] in (404, 422), key


def test_elsewhere_it_asks_for_the_token(runs: Path) -> None:
    with serving(Directories(runs), token=TOKEN) as (port, _):
        assert ask(port, "/")[0] == ask(port, "/api/runs")[0] == ask(port, "/page/app.js")[0] == 401
        assert ask(port, "/", Host="evil.example")[0] == 401
        assert ask(port, "/?token=wrong")[0] == 401
        assert (
            ask(port, "/api/runs?token=" + TOKEN)[0] == 401
        )  # the address bar is for the page alone
        status, headers, _ = ask(port, "/?token=" + TOKEN)
        assert status == 303 and headers["location"] == "/"
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
        assert ask(port, "/api/runs", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
        assert (
            ask(port, "/api/runs", Authorization=f"Bearer {TOKEN}", Host="10.0.0.7:8080")[0] == 200
        )
        assert ask(port, "/api/runs", Cookie="isoflop-token=\x7f; ;=;")[0] == 401


def test_only_what_changed_is_sent_again(tmp_path: Path) -> None:
    root = make_ladder(tmp_path / "demo", 2)
    with serving(Directories(root)) as (port, watcher):
        _, headers, body = ask(port, "/api/runs")
        first = json.loads(body)
        assert [len(first["runs"]), len(first["ids"])] == [2, 2]
        assert ask(port, "/api/runs", If_None_Match=headers["etag"])[0] == 304
        assert json.loads(ask(port, f"/api/runs?since={first['revision']}")[2])["runs"] == []
        make_run(root, "late", 5e5, 1e7, finish=False)
        (root / "damaged").mkdir()
        (root / "damaged" / "run.json").write_text("{")
        watcher.refresh()
        _, headers, body = ask(
            port, f"/api/runs?since={first['revision']}", If_None_Match=headers["etag"]
        )
        news = json.loads(body)
        assert [run["row"]["name"] for run in news["runs"]] == ["late"]
        assert len(news["ids"]) == 3 and "run.json is not JSON" in news["notes"][0]


def test_a_log_of_another_shape_costs_its_own_row_alone(tmp_path: Path) -> None:
    root = make_ladder(tmp_path / "demo", 2)
    odd = [{"kind": "step"}, {"kind": "step", "step": "x"}, {"kind": "step", "step": 401, "loss": "low"},
           {"kind": "eval", "step": 402, "loss": None}, {"kind": "moe", "step": 1}, {"kind": "event", "step": 3},
           {"kind": "event", "step": 1, "event": ["x"]}, {"kind": 7, "step": 1}, [], "text"]  # fmt: skip
    with (root / "tiny-20x" / "log.jsonl").open("a") as log:
        log.writelines(json.dumps(record) + "\n" for record in odd)
    make_run(root, "no-params", 1e5, 2e6, params={})
    watcher = Watcher(Directories(root))
    watcher.refresh()
    names = [json.loads(text)["row"]["name"] for _, text in watcher.snapshot.runs.values()]
    assert set(names) == {"tiny-20x", "mini-20x"} and "no-params" in watcher.snapshot.notes[0]
    for key in watcher.snapshot.runs:
        assert watcher.page(key)


def test_a_live_log_is_read_on_and_a_rewritten_one_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", "one", 2e5, 4e6, finish=False)
    os.utime(run / "log.jsonl")
    source = Directories(tmp_path / "demo")
    (key,) = source.scan()
    before = source.read(key)
    log = run / "log.jsonl"
    lines = log.read_text().splitlines()
    more = {**json.loads(lines[-2]), "kind": "step", "step": 300}
    log.write_text("\n".join([*lines, json.dumps(more)]) + '\n{"kind": "st')
    source.scan()
    assert before.run.last["step"] < 300 == source.read(key).run.last["step"]
    log.write_text("\n".join(lines[:100]) + "\n")  # a resume cuts the log back
    source.scan()
    assert source.read(key).run.last["step"] == json.loads(lines[99])["step"]


def test_nothing_that_schemathesis_thinks_of_breaks_it(local, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    port, _ = local
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"http://127.0.0.1:{port}/api/openapi.json",
    ]
    command += ["--checks", "all", "--max-examples", "15", "--seed", "1"]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=tmp_path
    )  # it leaves a cache
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "Tested: 3" in found.stdout
