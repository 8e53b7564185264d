"""Graceful and abrupt ends of real servers, servers with keys, and starts that fail.

Every test starts its own server, except that the tests in `TestKeys` share one.
"""

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.demo_questions import templated
from tests.support.server_process import WAIT_S, ServerProcess, run_command, serve, serve_fake, wait_until

ENDLESS: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
KEYS = ("first-key", "second-key")


def completion(**options: Any) -> dict[str, Any]:
    return {"model": "spell", "prompt": templated("hello world"), "temperature": 0, "stream": True, **options}


@contextmanager
def streaming(server: ServerProcess, **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Starts a stream and yields its remaining events, [DONE] as {}."""
    with (
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/completions", json=completion(**options)) as response,
    ):
        assert response.status_code == 200, response.read()
        events = (
            {} if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: ")
        )
        next(events)
        yield events


def test_sigterm_finishes_running_requests_and_refuses_new_ones(data_dir: Path) -> None:
    with serve(data_dir) as server, streaming(server, **ENDLESS) as events:
        engine = server.engine()
        engine.suspend()  # otherwise the stream may end too soon
        server.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503, "it says that it is not ready")
        refused = httpx.post(f"{server.url}/v1/completions", json=completion())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
        engine.resume()
        *rest, last, done = events
        assert rest
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == {}
        assert server.wait() == 0
        assert not engine.is_running()
    assert "finishing 1 sequences" in server.text
    assert "Traceback" not in server.text


def test_a_second_sigterm_ends_the_server_at_once(data_dir: Path) -> None:
    with serve(data_dir) as server, streaming(server, **ENDLESS):
        engine = server.engine()
        engine.suspend()  # otherwise the stream may end too soon
        server.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503, "the first one is heard")
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        engine.wait(WAIT_S)


def test_a_killed_engine_is_reported_to_clients_and_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    """The server does not restart its engine: its supervisor sees exit code 1, and clients see an error.

    This engine has no model: its output before the kill does not matter.
    """
    with serve_fake(tmp_path) as server, streaming(server, model="fake", **ENDLESS) as events:
        server.engine().kill()
        *_, last = events
        assert (last["error"]["code"], last["error"]["type"]) == ("engine_dead", "server_error")
        assert server.wait() == 1
    assert "the engine ended with signal 9" in server.text
    assert "Traceback" not in server.text


@pytest.fixture(scope="module")
def locked(data_dir: Path) -> Iterator[ServerProcess]:
    """A server that requires keys."""
    with serve(data_dir, "--api-key", KEYS[0], "--api-key", KEYS[1], "--host", "127.0.0.1") as server:
        yield server


LOGGING_IN = {"/v1/session": {"post"}}
"""Operations for callers without a session, which expect a key in the body."""


class TestKeys:
    def test_every_route_except_health_and_version_requires_a_key(self, locked: ServerProcess) -> None:
        with httpx.Client(base_url=locked.url, timeout=WAIT_S) as client:
            paths = client.get("/schema/openapi.json", headers=bearer(KEYS[0])).json()["paths"]
            open_routes: set[str] = set()
            for path, operations in paths.items():
                url = re.sub(r"\{\w+\}", "1", path)
                for method in operations.keys() - LOGGING_IN.get(path, set()):
                    for headers in (
                        {},
                        bearer("wrong"),
                        {"authorization": "Bearer"},
                        {"authorization": f"Basic {KEYS[0]}"},
                    ):
                        response = client.request(method, url, headers=headers, content=b"{}")
                        if response.status_code == 200:
                            open_routes.add(path)
                            continue
                        assert response.status_code == 401, (method, path, response.text)
                        assert response.headers["www-authenticate"] == "Bearer"
                        error = response.json()["error"]
                        if "/v1/messages" in path:  # These routes have Anthropic's errors.
                            assert error["type"] == "authentication_error"
                        else:  # LoRAX's routes have LoRAX's errors.
                            assert isinstance(error, str) or error["code"] == "invalid_api_key"
            assert open_routes == {"/health", "/ping", "/health/live", "/health/ready", "/version"}
            assert client.get("/schema/openapi.json").status_code == 401

    @pytest.mark.parametrize("key", KEYS)
    def test_each_configured_key_is_accepted(self, locked: ServerProcess, key: str) -> None:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client:
            assert client.models.retrieve("spell").id == "spell"
            answer = client.completions.create(model="spell", prompt=templated("cat"), temperature=0)
            assert answer.choices[0].text == "c-a-t"

    def test_a_wrong_key_raises_the_openai_clients_authentication_error(self, locked: ServerProcess) -> None:
        with (
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.completions.create(model="spell", prompt="x")
        assert caught.value.code == "invalid_api_key"

    def test_clients_cannot_load_adapters_from_the_servers_disk(self, locked: ServerProcess) -> None:
        body = {"lora_name": "x", "lora_path": "/etc"}
        response = httpx.post(f"{locked.url}/v1/load_lora_adapter", json=body, headers=bearer(KEYS[0]))
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")

    def test_keys_are_never_printed(self, locked: ServerProcess) -> None:
        assert not any(key in locked.text for key in KEYS)

    def test_a_killed_server_takes_its_engine_with_it(self, locked: ServerProcess) -> None:
        """Must stay the last test of the class: it kills the server that the others share."""
        engine = locked.engine()
        locked.signal(signal.SIGKILL)
        assert locked.wait() == -signal.SIGKILL
        engine.wait(WAIT_S)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestStartsThatFail:
    def test_a_port_in_use_is_reported(self, data_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ended = run_command("serve", "--port", str(port), "--data-dir", str(data_dir))
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == (
            f"error: port {port} on 127.0.0.1 is in use; stop the program that listens there or choose another --port\n"
        )

    def test_a_missing_model_is_reported_by_name(self, data_dir: Path, tmp_path: Path) -> None:
        for model in ("/does/not/exist", "no-such-org/no-such-model", str(tmp_path)):
            ended = run_command("serve", model, "--port", "0", "--data-dir", str(data_dir))
            assert ended.returncode == 1
            assert any(line.startswith("error: ") and model in line for line in ended.stderr.splitlines())
            assert "Traceback" not in ended.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--no-such-flag",), "--no-such-flag"),
            (("--max-model-ln", "5"), "--max-model-len"),
            (("--tensor-parallel-size", "2"), "--tensor-parallel-size"),
            (("--trust-remote-code",), "--trust-remote-code"),
            (("--port", "99999"), "99999"),
            (("--num-threads", "0"), "0"),
            (("--dtype", "int3"), "int3"),
            (("--kv-cache-memory-bytes", "lots"), "lots"),
            (("--lora-modules", "nameless"), "nameless"),
            (("--adapter-dir", "/does/not/exist"), "/does/not/exist"),
        ],
    )
    def test_a_bad_flag_is_named(self, arguments: tuple[str, ...], said: str) -> None:
        ended = run_command("serve", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
