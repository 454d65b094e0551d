# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""To whom a command sends its token or password: to the server that was named, and to nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import Broker, broker, part  # noqa: F401 - a fixture

COMMANDS = (("queue", "list"), ("config", "reload"), ("check", "alive"), ("top", "--once"))


class Redirecting(HTTPServer):
    """A server that redirects each request to another server."""

    def __init__(self, to: str, code: int) -> None:
        super().__init__(("127.0.0.1", 0), Redirect)
        self.to = to
        self.code = code


class Redirect(BaseHTTPRequestHandler):
    server: Redirecting

    def do_GET(self) -> None:
        self.send_response(self.server.code)
        self.send_header("location", self.server.to + self.path)
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - the name in the standard library

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[302, 307])
def redirecting(request: pytest.FixtureRequest, broker: Broker) -> Iterator[str]:
    with Redirecting(broker.url, request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def token(bascule: Bascule) -> None:
    """Settings with a token, in the directory of the commands."""
    Path("bascule.toml").write_text("[admin]\ntoken = 'hush'\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_redirect_is_not_followed(command: tuple[str, ...], redirecting: str, broker: Broker, bascule: Bascule) -> None:
    done = bascule(*command, "--admin", redirecting)
    assert broker.asked == []
    assert done.returncode in (2, 3)
    assert "redirects are not followed; give the address of the admin server itself" in done.stdout + done.stderr


def test_proxy_of_the_environment_gets_no_request(broker: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("http_proxy", broker.url)
    done = bascule("queue", "list", "--admin", "http://127.0.0.1:1")
    assert (broker.asked, done.returncode) == ([], 3)


@pytest.mark.parametrize("key", ["token", "edit_token", "view_token"])
def test_token_of_the_settings_goes_to_other_machines_only_over_https(key: str, bascule: Bascule) -> None:
    Path("bascule.toml").write_text(f"[admin]\n{key} = 'hush'\n")
    for url in ("http://192.0.2.1:1", "http://broker.invalid:1", "http://127.0.0.1.invalid:1"):
        done = bascule("queue", "list", "--admin", url)
        assert (done.returncode, f"admin.{key} would be sent unencrypted to {url}; use https" in done.stderr) == (2, True)
        assert "broker.allow_insecure" in done.stderr


def test_token_goes_to_another_machine_in_clear_if_the_settings_accept_the_risk(bascule: Bascule) -> None:
    Path("bascule.toml").write_text("[broker]\nallow_insecure = true\n[admin]\ntoken = 'hush'\n")
    assert "no broker answers" in bascule("queue", "list", "--admin", "http://broker.invalid:1").stderr


def test_address_of_all_interfaces_is_this_machine(broker: Broker, bascule: Bascule) -> None:
    broker.answers["/list/queues"] = (200, part())
    Path("bascule.toml").write_text(f"[admin]\nhost = '0.0.0.0'\nport = {broker.server_address[1]}\ntoken = 'hush'\n")
    assert bascule("queue", "list").returncode == 0
    assert broker.token == "Bearer hush"


@pytest.mark.parametrize("url", ["file:///etc", "ftp://127.0.0.1", "data:,[]", "localhost:8672", "https:", "HTTP//x"])
def test_address_with_another_scheme_is_refused(url: str, bascule: Bascule) -> None:
    done = bascule("queue", "list", "--admin", url)
    assert (done.returncode, "must begin with https:// or http://" in done.stderr) == (2, True)


@pytest.mark.parametrize("content", ["hush\nmore", "hush more", "hush\r\nx-evil: 1", "h\u00fcsh", "hush\x00"])
def test_file_that_is_no_token_is_refused_without_its_content(content: str, broker: Broker, bascule: Bascule) -> None:
    Path("token").write_text(content)
    Path("bascule.toml").write_text("[admin]\ntoken = 'file:token'\n")
    done = bascule("queue", "list", "--admin", broker.url)
    assert (done.returncode, broker.asked, "admin.token is empty, or has characters that no token has" in done.stderr) == (2, [], True)
    bascule("context", "add", "one", "--admin", broker.url, "--token-file", "token")
    from_context = bascule("queue", "list", "--context", "one")
    assert (from_context.returncode, "the token of context 'one' is empty, or has" in from_context.stderr) == (2, True)
    assert "sh" not in (done.stderr + from_context.stderr).replace("such", "")


def test_name_with_a_colon_is_no_user_of_http(broker: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_PASSWORD", "hush")
    done = bascule("queue", "list", "--admin", broker.url.replace("//", "//ann%3Ax@"))
    assert (done.returncode, broker.asked, "has a colon" in done.stderr) == (2, [], True)


@pytest.mark.parametrize("content", ["NaN", '[{"messages": Infinity}]', "[" * 100_000, "<html>", ""])
def test_answer_that_is_not_json_is_refused(content: str, broker: Broker, bascule: Bascule) -> None:
    broker.answers["/list/queues"] = (200, content)
    done = bascule("queue", "list", "--admin", broker.url)
    assert (done.returncode, "its answer is not JSON" in done.stderr) == (2, True)
