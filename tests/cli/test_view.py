"""`attnfuse view`: the pages of models on the loopback address, and requests of others, which are refused."""

from __future__ import annotations

import http.client
import pathlib
import threading
from collections.abc import Iterator

import pytest

from onnx_attnfuse_cli import view
from onnx_attnfuse_cli.main import main
from tests.support import small_models

Captured = pytest.CaptureFixture[str]
Asked = tuple[int, str]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    small_models.written(small_models.ATTENTION, tmp_path / "models" / "a b.onnx")
    (tmp_path / "models" / "broken.onnx").write_text("nothing of the kind")
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What a browser gets of each page that a run serves: the run ends where it would wait for requests."""
    seen: list[Asked] = []

    def once(server: view.Server) -> None:
        thread = threading.Thread(target=super(view.Server, server).serve_forever)
        thread.start()
        seen.extend(asked(server, path) for path in server.pages)
        server.shutdown()
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(view.Server, "serve_forever", once)
    return seen


def asked(server: view.Server, path: str = "/", method: str = "GET", **headers: str) -> Asked:
    """The status and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert method != "GET" or "default-src 'none'" in answer.headers["Content-Security-Policy"]
    connection.close()
    return answer.status, text


@pytest.fixture
def server() -> Iterator[view.Server]:
    with view.Server() as found:
        found.pages = {"/": b"<p>page</p>"}
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_one_model_is_the_first_page(folder: pathlib.Path, served: list[Asked], capsys: Captured) -> None:
    assert main(["view", "models/a b.onnx", "--no-open", "--ep", "cpu"]) == 0
    assert "shows 1 model; Ctrl+C ends it" in capsys.readouterr().out
    assert [status for status, _ in served] == [200, 200]
    assert served[0] == served[1]
    assert "would fuse 1 of 1 attention site" in served[0][1]
    assert [path.name for path in folder.rglob("*")] == ["models", *(path.name for path in (folder / "models").iterdir())]


def test_a_folder_is_a_list_and_what_fails_costs_itself(
    folder: pathlib.Path, served: list[Asked], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["view", "models"]) == 0
    said = capsys.readouterr()
    assert "Error: models/broken.onnx: " in said.err
    assert [said.out.split()[0]] == opened
    (_, page), (_, index) = served
    assert 'href="a%20b.html"' in index
    assert "could not be done" in index
    assert "would fuse 1 of 1 attention sites" in index
    assert "<h1>a b.onnx</h1>" in page


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "127.0.0.1:{port}", "Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Host": "127.0.0.1"}, 403),
        ({"Host": "attacker.example:{port}"}, 403),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
    ],
)
def test_other_hosts_and_origins_are_refused(headers: dict[str, str], status: int, server: view.Server) -> None:
    given = {name: value.format(port=server.server_port) for name, value in headers.items()}
    assert asked(server, **given) == (status, "<p>page</p>" if status == 200 else "")


@pytest.mark.parametrize(("path", "method", "status"), [("/other", "GET", 404), ("/../x", "GET", 404), ("/", "POST", 501)])
def test_nothing_else_is_answered(path: str, method: str, status: int, server: view.Server) -> None:
    assert asked(server, path, method)[0] == status
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/", "HEAD") == (200, "")


def test_a_port_in_use_and_a_model_that_is_not_there(folder: pathlib.Path, server: view.Server, capsys: Captured) -> None:
    assert main(["view", "models/a b.onnx", "--port", str(server.server_port)]) == 2
    assert capsys.readouterr().err.endswith("; choose another --port\n")
    assert main(["view", "org/name"]) == 2
    assert "optimum-cli export onnx --model org/name" in capsys.readouterr().err
    assert main(["view", "models/broken.onnx"]) == 2
