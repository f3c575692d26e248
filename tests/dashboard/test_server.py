"""What the server answers, and whom it refuses."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvicorn
from starlette.testclient import TestClient

from pipeline.dashboard import server
from pipeline.dashboard.live import Watcher
from pipeline.dashboard.source import Directories
from tests.dashboard.served import serving
from tests.scaling.made_runs import make_ladder, make_run
from tests.track.mlflow_server import until

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ladder(tmp_path_factory.mktemp("server") / "demo")


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with serving(Directories(runs)) as (found, _):
        yield found


def ask(port: int, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """Send a request; the body of the answer is in its `body`."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    link.request(method, path, headers=named)
    answer = link.getresponse()
    answer.body = answer.read()
    return answer


def test_only_its_own_host_and_origin_are_served(port) -> None:
    foreign = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", "")
    for host in (*foreign, "localhost@evil", "[::1"):
        assert ask(port, "/api/runs", Host=host).status == 400, host
    for host in (f"localhost:{port}", "127.0.0.1:9999", "[::1]:80"):  # a tunnel may change the port
        assert ask(port, "/api/runs", Host=host).status == 200, host
    assert ask(port, "/", Origin="http://evil.example").status == 403
    for origin in ("null", "http://[", ""):
        assert ask(port, "/api/runs", Origin=origin).status == 403, origin
    assert ask(port, "/api/runs", Origin=f"http://127.0.0.1:{port}").status == 200


def test_every_answer_carries_the_policy_and_nothing_is_written(port) -> None:
    missing = ("/nothing", "/api/runs/ffffffffffff")
    for path in ("/", "/page/app.js", "/api/runs", "/api/laws", *missing):
        answer = ask(port, path)
        assert "script-src 'self';" in answer.headers["content-security-policy"], path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(port, path, method).status in (404, 405), (method, path)
    page = ask(port, "/").body.decode()
    assert "<script>" not in page and "onclick" not in page and "https:" not in page
    refused = ask(port, "/", Host="evil.example")
    assert "default-src 'none'" in refused.headers["content-security-policy"]


def test_no_path_reaches_the_file_system(port, runs: Path) -> None:
    for path in ("../../pyproject.toml", "%2e%2e%2fserver.py", "..%5cserver.py", "page.html", "/etc/passwd", "%00",
                 "server.py", ".", "..", "app.js%00.css", str(runs / "tiny-20x" / "run.json")):  # fmt: skip
        answer = ask(port, f"/page/{path}")
        assert answer.status in (400, 404), path
        assert b"isoflop" not in answer.body and b"root:" not in answer.body
    for key in ("../tiny-20x", "tiny-20x", "%2e%2e", "0" * 12, "a" * 5000):
        assert ask(port, f"/api/runs/{key}").status in (404, 422), key


def test_with_a_token_every_request_needs_it(runs: Path) -> None:
    with serving(Directories(runs), token=TOKEN) as (port, _):
        for path in ("/", "/api/runs", "/page/app.js", "/?token=wrong"):
            assert ask(port, path).status == 401, path
        assert ask(port, "/", Host="evil.example").status == 401
        # Only the page itself accepts the token in the address.
        assert ask(port, "/api/runs?token=" + TOKEN).status == 401
        answer = ask(port, "/?token=" + TOKEN)
        cookie = answer.headers["set-cookie"]
        assert answer.status == 303 and answer.headers["location"] == "/"
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert ask(port, "/api/runs", Cookie=cookie.split(";")[0]).status == 200
        bearer = f"Bearer {TOKEN}"
        assert ask(port, "/api/runs", Authorization=bearer, Host="10.0.0.7:8080").status == 200
        assert ask(port, "/api/runs", Cookie="isoflop-token=\x7f; ;=;").status == 401


@pytest.mark.parametrize("token", ["a+b&c=d", "#x y;z%20", "müde東京"])
def test_any_token_works_as_address_and_cookie(tmp_path, monkeypatch, capsys, token) -> None:
    from launch import dashboard

    monkeypatch.setenv(dashboard.TOKEN, token)
    monkeypatch.setattr(server, "web_server", lambda watcher, token: uvicorn.Server)
    monkeypatch.setattr(uvicorn.Server, "run", lambda sockets: sockets[0].close())
    watcher = Watcher(Directories(tmp_path))
    dashboard.serve(watcher, "0.0.0.0", 0, as_json=True)
    address = json.loads(capsys.readouterr().out)["url"].replace("0.0.0.0", "here")
    with TestClient(server.application(watcher, token), "http://here") as client:
        assert client.get("/api/laws").status_code == 401
        assert client.get(address).status_code == 200
        assert client.get("/api/laws").status_code == 200


def test_only_what_changed_is_sent_again(tmp_path: Path) -> None:
    root = make_ladder(tmp_path / "demo", 2)
    with serving(Directories(root)) as (port, watcher):
        answer = ask(port, "/api/runs")
        tag = answer.headers["etag"]
        first = json.loads(answer.body)
        assert [len(first["runs"]), len(first["ids"])] == [2, 2]
        assert ask(port, "/api/runs", If_None_Match=tag).status == 304
        address = f"/api/runs?since={first['revision']}"
        assert json.loads(ask(port, address).body)["runs"] == []
        make_run(root, "late", 5e5, 1e7, finish=False)
        (root / "damaged").mkdir()
        (root / "damaged" / "run.json").write_text("{")
        watcher.refresh()
        news = json.loads(ask(port, address, If_None_Match=tag).body)
        assert [run["row"]["name"] for run in news["runs"]] == ["late"]
        assert len(news["ids"]) == 3 and str(root / "damaged") in news["notes"][0]


def test_a_run_that_is_deleted_disappears_without_a_note(tmp_path: Path) -> None:
    root = make_ladder(tmp_path / "demo", 3)
    source = Directories(root)
    watcher = Watcher(source)
    stamps = source.scan()
    (gone,) = [key for key in stamps if "mini" in source.label(key)]
    for file in (root / "mini-20x").iterdir():
        file.unlink()
    source.scan = lambda: stamps  # the deletion came after the scan
    watcher.refresh()
    assert len(watcher.snapshot.runs) == 2 and watcher.snapshot.notes == ()
    assert watcher.page(gone) is None


def test_a_growing_log_is_read_incrementally_and_a_truncated_one_again(tmp_path: Path) -> None:
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
    log.write_text("\n".join(lines[:100]) + "\n")  # a resume truncates the log
    source.scan()
    assert source.read(key).run.last["step"] == json.loads(lines[99])["step"]


def connections(port: int) -> int:
    """Count the server's connections that are still open."""
    found = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in found)


def test_half_sent_requests_are_closed_and_keep_nobody_out(runs, monkeypatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 5.0)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 50)
    with serving(Directories(runs)) as (port, _), contextlib.ExitStack() as stack:
        for _ in range(400):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            link.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # without the empty line
        assert ask(port, "/api/runs").status == 200
        assert connections(port) <= 60
        until(lambda: connections(port) == 0, 60)


def test_clients_that_send_or_read_too_slowly_are_closed(runs, monkeypatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server, "ANSWER_TIMEOUT_S", 1.0)
    with serving(Directories(runs)) as (port, _):
        with socket.create_connection(("127.0.0.1", port)) as slow, pytest.raises(ConnectionError):
            for _ in range(600):
                slow.sendall(b"G")
                time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            deaf.sendall(b"GET /page/plotly.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
            until(lambda: connections(port) == 0, 60)


@pytest.mark.slow
def test_nothing_that_schemathesis_generates_breaks_it(port, tmp_path: Path) -> None:
    schema = f"http://127.0.0.1:{port}/api/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", schema]
    command += ["--checks", "not_a_server_error", "--max-examples", "15", "--seed", "1"]
    # schemathesis leaves a cache in the working directory.
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "Tested: 3" in found.stdout
