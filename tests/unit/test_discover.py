# `farandole discover`: hosts from SLURM's variables, hostfiles, MPIJob folders and the Kubernetes API.
# Touches files, and starts a small HTTP server on the loopback interface.
"""The API's answers have the format of the real ones; no real cluster is used."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch.hosts import Host
from farandole.tools import discover
from farandole.tools.discover import NotFound, expand, from_slurm, main


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_lists_of_slurm(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-x]", "n[1-999999999]", "n[;rm]"])
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(NotFound):
        expand(text)


def test_slurm() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert from_slurm(environ, None) == [Host("n1", 4), Host("n2", 4), Host("n3", 2)]
    assert from_slurm(environ, 1) == [Host("n1", 1), Host("n2", 1), Host("n3", 1)]
    with pytest.raises(NotFound, match="no job of SLURM"):
        from_slurm({}, None)
    with pytest.raises(NotFound, match="3 nodes"):
        from_slurm({**environ, "SLURM_TASKS_PER_NODE": "4"}, None)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=1\n")
    assert main(["hostfile", str(tmp_path / "hostfile")]) == 0
    assert capsys.readouterr().out == "a:2\nb:1\n"
    assert main(["mpijob", "--folder", str(tmp_path), "--slots", "4"]) == 0
    assert capsys.readouterr().out == "a:4\nb:4\n"
    (tmp_path / "discover_hosts.sh").write_text("#!/bin/sh\necho w-0.w:2\necho w-1.w:2\n")
    assert main(["mpijob", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "w-0.w:2\nw-1.w:2\n"
    (tmp_path / "discover_hosts.sh").write_text("#!/bin/sh\necho -oProxyCommand=x:2\n")
    assert main(["mpijob", "--folder", str(tmp_path)]) == 1
    assert main(["hostfile", str(tmp_path / "none")]) == 1
    assert "cannot read" in capsys.readouterr().err


def pod(address: str, ready: str = "True", **metadata: str) -> dict[str, object]:
    return {"metadata": metadata, "status": {"podIP": address, "conditions": [{"type": "Ready", "status": ready}]}}


@pytest.fixture
def api() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    asked: list[tuple[str, str]] = []
    items = [pod("10.0.0.2"), pod("10.0.0.1"), pod("10.0.0.3", "False"), pod("10.0.0.4", deletionTimestamp="now"), {}]

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200 if "app%3Dtrain" in self.path else 403)
            self.end_headers()
            self.wfile.write(json.dumps({"items": items}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_kubernetes(tmp_path: Path, api: tuple[str, list[tuple[str, str]]], capsys: pytest.CaptureFixture[str]) -> None:
    address, asked = api
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("mine")
    arguments = ["k8s", "--api", address, "--account", str(tmp_path), "--slots", "8", "--selector"]
    assert main([*arguments, "app=train"]) == 0
    assert capsys.readouterr().out == "10.0.0.1:8\n10.0.0.2:8\n"
    assert asked == [("/api/v1/namespaces/mine/pods?labelSelector=app%3Dtrain", "Bearer secret")]
    assert main([*arguments, "other"]) == 1
    output = capsys.readouterr().err
    assert "403" in output and "list pods" in output and "secret" not in output
    assert main(["k8s", "--account", str(tmp_path), "--selector", "a"]) == 1
    assert "no pod of Kubernetes" in capsys.readouterr().err
    with pytest.raises(NotFound, match="service account"):
        discover.from_kubernetes({}, "a", 1, tmp_path / "none", address)
