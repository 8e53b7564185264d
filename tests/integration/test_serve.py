"""`loraserve serve` as a process: start, announce, drain, fail. The engine is fake."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.control.uploads.service import MAX_OPEN_UPLOADS
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Role
from tests.support.forked_process import ForkedProcess
from tests.support.management import fake_adapter
from tests.support.server_process import start_fake, wait_until

SERVE_FAKE = Path(__file__).parents[1] / "support" / "serve_fake.py"
WAIT_S = 30.0
ENDLESS = 1 << 25


@dataclass
class Server:
    process: subprocess.Popen[str] | ForkedProcess
    output: list[str]
    url: str

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def engine(self) -> psutil.Process:
        """The engine process, not the private Redis."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if "fake_engine" in " ".join(child.cmdline()))
        return engine


def start(
    data_dir: Path,
    *args: str,
    model: str = "fake",
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORASERVE_")}
    return subprocess.Popen(
        [sys.executable, "-P", str(SERVE_FAKE), model, "--port", "0", "--data-dir", str(data_dir), *args],
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**environment, "PYTHONPATH": path, "COLUMNS": "200"},
    )


def run_to_end(data_dir: Path, *args: str, model: str = "fake") -> tuple[int, str]:
    with start(data_dir, *args, model=model) as process:
        output, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, output


@contextmanager
def running_server(data_dir: Path, *args: str) -> Iterator[Server]:
    process = start_fake("--data-dir", str(data_dir), *args)
    assert process.stdout is not None
    output: list[str] = []
    # Keeps reading, so that the server never blocks on its output.
    reader = threading.Thread(target=lambda: output.extend(line.rstrip() for line in process.stdout or []))
    with process.stdout:
        try:
            url = _read_until_ready(process.stdout, output)
            reader.start()
            yield Server(process, output, url)
        finally:
            process.kill()
            process.wait(WAIT_S)
            if reader.is_alive():
                reader.join(WAIT_S)


def _read_until_ready(lines: Iterable[str], output: list[str]) -> str:
    """The server's URL."""
    for line in lines:
        output.append(line.rstrip())
        if found := re.match(r"loraserve is ready: .*(http://[^\s)]+)", line):
            return found[1]
    raise AssertionError("\n".join(output))


def completion(max_tokens: int) -> dict[str, object]:
    return {"model": "fake", "prompt": [1, 2], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


def ready_status(server: Server) -> int:
    return httpx.get(f"{server.url}/health/ready").status_code


def stream_events(lines: Iterator[str]) -> Iterator[dict]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def streaming(server: Server, max_tokens: int) -> Iterator[Iterator[dict]]:
    """A stream whose first event has arrived."""
    with (
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/completions", json=completion(max_tokens)) as response,
    ):
        assert response.status_code == 200, response.read()
        events = stream_events(response.iter_lines())
        next(events)
        yield events


def finish_reason(events: Iterator[dict]) -> str | None:
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    return reasons[-1]


def test_the_banner_shows_the_url_and_sigterm_stops_the_server(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "fake"
        server.stop()
        assert server.wait() == 0
    text = "\n".join(server.output)
    assert "weights: 3 of 3" in text
    assert f"curl {server.url}/v1/models" in text
    assert f"curl {server.url}/v1/completions" in text
    assert str(tmp_path / "data") in text
    assert not (tmp_path / "data").stat().st_mode & 0o077


@contextmanager
def hangup(action: signal.Handlers) -> Iterator[None]:
    """Servers started inside inherit this action for SIGHUP even if the tests run under `nohup`, which ignores it."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_signal_to_the_whole_process_group_drains_the_server(tmp_path: Path, number: signal.Signals) -> None:
    with hangup(signal.SIG_DFL), running_server(tmp_path) as server, streaming(server, 200) as events:
        server.engine().send_signal(number)
        server.stop(number)
        assert finish_reason(events) == "length"
        assert server.wait() == 0


def test_a_second_sighup_does_not_cut_the_drain_short(tmp_path: Path) -> None:
    with hangup(signal.SIG_DFL), running_server(tmp_path) as server, streaming(server, 200) as events:
        server.engine().suspend()  # otherwise the stream may end too soon
        server.stop(signal.SIGHUP)
        wait_until(lambda: ready_status(server) == 503, "the first one is heard")
        server.stop(signal.SIGHUP)
        server.engine().resume()
        assert finish_reason(events) == "length"
        assert server.wait() == 0


def test_sighup_is_ignored_under_nohup(tmp_path: Path) -> None:
    with hangup(signal.SIG_IGN), running_server(tmp_path) as server, streaming(server, 200) as events:
        server.stop(signal.SIGHUP)
        assert finish_reason(events) == "length"
        assert httpx.post(f"{server.url}/v1/completions", json=completion(1)).status_code == 200


def test_drain_finishes_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, streaming(server, 200) as events:
        server.engine().suspend()  # otherwise the stream may end too soon
        server.stop()
        wait_until(lambda: ready_status(server) == 503, "it drains")
        answer = httpx.post(f"{server.url}/v1/completions", json=completion(1))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_draining"
        server.engine().resume()
        assert finish_reason(events) == "length"
        assert server.wait() == 0


def test_requests_that_outlive_the_shutdown_timeout_are_aborted(tmp_path: Path) -> None:
    with running_server(tmp_path, "--shutdown-timeout", "0.2") as server, streaming(server, ENDLESS) as events:
        server.stop()
        assert finish_reason(events) == "abort"
        assert server.wait() == 0


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, streaming(server, ENDLESS):
        engine = server.engine()
        server.stop()
        wait_until(lambda: ready_status(server) == 503, "the first one is heard")
        server.stop()
        assert server.wait() == 1
        engine.wait(WAIT_S)


def test_signal_during_the_start_stops_cleanly(tmp_path: Path) -> None:
    with start(tmp_path, model="slow") as process:
        assert process.stdout is not None
        assert "weights" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_engine_death_stops_the_server_with_the_reason(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        server.engine().kill()
        assert server.wait() == 1
    assert "the engine ended with signal 9" in "\n".join(server.output)


def test_the_error_for_an_unusable_data_directory_names_the_path_in_it(tmp_path: Path) -> None:
    (tmp_path / "docs").write_text("")
    code, output = run_to_end(tmp_path)
    assert code == 1
    wrong = tmp_path / "docs" / "tmp"
    assert output.splitlines()[-1] == f"error: --data-dir {tmp_path} cannot be used: {wrong}: Not a directory"


def test_a_taken_port_is_a_one_line_error_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = run_to_end(tmp_path, "--port", str(port))
    assert code == 1
    assert (
        output
        == f"error: port {port} on 127.0.0.1 is in use; stop the program that listens there or choose another --port\n"
    )


def test_a_refused_model_is_a_one_line_error(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path, model="refused")
    assert code == 1
    assert output.splitlines()[-1] == "error: the model is refused because of a reason"


def test_a_bad_adapter_stops_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code, output = run_to_end(tmp_path, "--lora-modules", f"sql={tmp_path / 'folder'}")
    assert code == 1
    assert f"error: adapter 'sql' from {tmp_path / 'folder'}: " in output
    assert "adapter_config.json" in output


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_missing_adapter_is_reported_before_the_model_is_loaded(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    code, output = run_to_end(tmp_path, "--lora-modules", f"sql={tmp_path / folder}")
    assert code == 1
    assert output.splitlines()[-1].startswith(f"error: adapter 'sql' from {tmp_path / folder}: ")
    assert "starting the engine: 1 of 1" not in output


def test_adapters_with_unused_chat_templates_are_named_in_one_line(tmp_path: Path) -> None:
    for seed, name in enumerate(("own", "plain", "other")):
        fake_adapter(tmp_path / "adapters" / name, seed)
    for name in ("own", "other"):
        (tmp_path / "adapters" / name / "chat_template.jinja").write_text("{{ messages }}")
    with running_server(tmp_path / "data", "--no-certificates", "--adapter-dir", str(tmp_path / "adapters")) as server:
        server.stop()
        assert server.wait() == 0
    notes = [line for line in server.output if "chat template" in line]
    assert len(notes) == 1
    assert notes[0].startswith("  note      chats are rendered with the base model's chat template")
    assert notes[0].endswith(": other, own")


def test_startup_can_add_more_adapters_than_uploads_may_be_open(tmp_path: Path) -> None:
    names = {f"skill-{seed}" for seed in range(MAX_OPEN_UPLOADS + 6)}
    for seed, name in enumerate(sorted(names)):
        fake_adapter(tmp_path / "adapters" / name, seed)
    with running_server(tmp_path / "data", "--no-certificates", "--adapter-dir", str(tmp_path / "adapters")) as server:
        models = httpx.get(f"{server.url}/v1/models", params={"limit": 1000}).json()["data"]
        assert {model["id"] for model in models} >= names


def test_a_restart_adds_versions_only_for_changed_adapters(tmp_path: Path) -> None:
    for seed, name in enumerate(("same", "changed")):
        fake_adapter(tmp_path / "adapters" / name, seed)
    time.sleep(1.1)  # until file times reveal every later change

    def versions() -> dict[str, int]:
        options = ("--no-certificates", "--adapter-dir", str(tmp_path / "adapters"))
        with running_server(tmp_path / "data", *options) as server:
            adapters = httpx.get(f"{server.url}/v1/adapters").json()["data"]
            server.stop()
            assert server.wait() == 0
        return {adapter["name"]: adapter["live"]["n"] for adapter in adapters}

    assert versions() == {"same": 1, "changed": 1}
    assert list((tmp_path / "data").glob("sources-*.json"))
    fake_adapter(tmp_path / "adapters" / "changed", 7)
    assert versions() == {"same": 1, "changed": 2}


def test_the_server_can_listen_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with running_server(tmp_path, "--uds", str(path)) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/v1/models").status_code == 200
        server.stop()
        assert server.wait() == 0
    assert f"--unix-socket {path}" in "\n".join(server.output)
    assert not path.exists()


def test_stale_unix_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        code, output = run_to_end(tmp_path, "--uds", str(path))
        assert code == 1
        assert "is in use" in output
    with running_server(tmp_path, "--uds", str(path)) as server:
        server.stop()
        assert server.wait() == 0


def test_a_too_long_unix_socket_path_is_reported(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path, "--uds", str(tmp_path / ("long" * 30)))
    assert code == 1
    assert "AF_UNIX path too long" in output


def test_keys_are_required_and_the_banner_shows_a_variable_instead(tmp_path: Path) -> None:
    with running_server(tmp_path, "--api-key", "secret", "--host", "127.0.0.1") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        server.stop()
        assert server.wait() == 0
    text = "\n".join(server.output)
    assert "Bearer $LORASERVE_API_KEY" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--host", "0.0.0.0"], "on 0.0.0.0 other machines can reach the server, but it has no admin key."),
        (
            ["--api-key", "secret"],
            "on 0.0.0.0 (the default with --api-key) other machines can reach the server, but it has no admin key; "
            "a key given with --api-key can only infer.",
        ),
    ],
)
def test_start_on_a_reachable_host_without_an_admin_key_fails_and_names_remedies(
    options: list[str], reason: str, tmp_path: Path
) -> None:
    code, output = run_to_end(tmp_path, *options)
    remedies = f"`loraserve keys create --role admin --data-dir {tmp_path}`, or start with --host 127.0.0.1"
    assert code == 1
    assert f"error: {reason} Create an admin key with {remedies}\n" in output


def test_a_server_with_an_unreadable_key_requires_keys_and_names_the_file(tmp_path: Path) -> None:
    create_key_offline(DocumentStore(tmp_path), role=Role.ADMIN, tenant=ANY_TENANT)
    (path,) = (tmp_path / "docs" / "key").glob("*/*/*.json")
    path.write_bytes(b"torn")
    with running_server(tmp_path) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/v1/keys").status_code == 401
        server.stop()
        assert server.wait() == 0
    text = "\n".join(server.output)
    assert f"{path}: cannot be read" in text
    assert "none of their documents can be read" in text
    exit_code, text = run_to_end(tmp_path, "--host", "0.0.0.0")
    assert exit_code != 0
    assert f"{path}: cannot be read" in text


def test_a_chat_template_option_enables_chats_for_a_model_without_one(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    with running_server(tmp_path / "data", "--chat-template", str(template)) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len("hello")
        server.stop()
        assert server.wait() == 0
    assert f"curl -N {server.url}/v1/chat/completions" in "\n".join(server.output)


def test_an_adapter_uses_the_chat_template_that_its_config_names(tmp_path: Path) -> None:
    template = tmp_path / "twice.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    for seed, name in enumerate(("twice", "thrice", None)):
        folder = fake_adapter(tmp_path / "adapters" / str(name), seed)
        fields = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(fields | {"chat_template": name}))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    value = json.dumps({"name": "twice", "path": str(template), "stop_tokens": ["<|end|>"]})
    options = "--no-certificates", "--adapter-chat-templates", value
    code, output = run_to_end(tmp_path / "data", *options, "--lora-modules", f"thrice={tmp_path}/adapters/thrice")
    assert code == 1
    reason = 'chat_template: the server has no template called "thrice"; expected one of twice'
    assert reason in output
    modules = [f"{name}={tmp_path}/adapters/{name}" for name in ("twice", "None")]
    messages = [{"role": "user", "content": "hello"}]
    with running_server(tmp_path / "data", *options, "--lora-modules", *modules) as server:
        body = {"model": "twice", "messages": messages, "max_tokens": 3}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == len("hellohello")
        server.stop()
        assert server.wait() == 0
    (note,) = (line for line in server.output if "chat template" in line)
    assert note.endswith(": None")
    # Started without the template, the server still serves the repacked adapter and reports the missing template.
    for packed in (tmp_path / "data" / "packed").iterdir():
        packed.unlink()
    options = "--no-certificates", "--chat-template", str(template)
    with running_server(tmp_path / "data", *options, "--lora-modules", *modules) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert "chat template 'twice' is not available on this server" in answer.json()["error"]["message"]
        body = {"model": "twice", "prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.stop()
        assert server.wait() == 0
    told = "  note      --adapter-chat-templates does not define twice: chats with twice are refused"
    assert told in server.output
    assert '{"model": "twice"' not in "\n".join(server.output)  # no example that would be refused


@pytest.mark.parametrize("flags", [(), ("--tool-call-parser", "llama3_json", "--enable-auto-tool-choice")])
def test_optional_tool_calls_require_a_parser(tmp_path: Path, flags: tuple[str, ...]) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "tools": [tool], "max_tokens": 3}
    with running_server(tmp_path / "data", "--chat-template", str(template), *flags) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        server.stop()
        assert server.wait() == 0
    if flags:
        assert answer.json()["usage"]["prompt_tokens"] == len("addhello")
    else:
        assert answer.status_code == 400
        assert (
            "--tool-call-parser {hermes,llama3_json,mistral,qwen3_coder,glm45,lfm2,openai}"
            in answer.json()["error"]["message"]
        )


def _send(server: Server, data: bytes) -> bytes:
    """The bytes received until the server closes the connection."""
    url = httpx.URL(server.url)
    received = b""
    with socket.create_connection((url.host, url.port or 80), WAIT_S) as connection:
        try:
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                received += piece
        except ConnectionError:
            pass
    return received


@contextmanager
def _dead_output(kind: str) -> Iterator[int]:
    """A descriptor that accepts no output."""
    if kind == "full":
        with open("/dev/full", "wb") as full:
            yield full.fileno()
        return
    reader, writer = os.pipe()
    with open(writer, "wb"), open(reader, "rb") as unread:
        if kind == "gone":
            unread.close()
        else:
            _fill(writer)
        yield writer


def _fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * select.PIPE_BUF)
    os.set_blocking(pipe, True)


@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
@pytest.mark.parametrize("kind", ["full", "gone", "unread"])
def test_the_server_keeps_running_if_its_output_cannot_be_written(
    kind: str, streams: tuple[str, ...], tmp_path: Path
) -> None:
    if kind == "full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    output = tmp_path / "output"
    uds = tmp_path / "server.sock"
    with output.open("wb") as file, _dead_output(kind) as dead:
        stdout, stderr = (dead if name in streams else file.fileno() for name in ("stdout", "stderr"))
        process = start(tmp_path / "data", "--uds", str(uds), stdout=stdout, stderr=stderr)
        try:
            wait_until(lambda: process.poll() is not None or _is_healthy(uds), "an answer")
            # The banner is printed after the first answers.
            if "stdout" in streams:
                time.sleep(0.5)
            else:
                wait_until(lambda: "loraserve is ready" in output.read_text(), "the banner")
            assert _is_healthy(uds), output.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, output.read_text()
        finally:
            process.kill()
            process.wait(WAIT_S)
    text = output.read_text()
    assert "Traceback" not in text
    assert "ignored" not in text
    assert ("loraserve is ready" in text) is ("stdout" not in streams)
    assert ("weights: 3 of 3" in text) is ("stderr" not in streams)


def _is_healthy(uds: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(uds))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return connection.recv(1 << 10).startswith(b"HTTP/1.1 200 ")
    return False


def test_an_endless_head_is_cut_off(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server:
        before = psutil.Process(server.process.pid).memory_info().rss
        for beginning in (b"GET /", b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: "):
            answer = _send(server, beginning + b"x" * (64 << 20))
            assert not answer or answer.startswith(b"HTTP/1.1 431 ")
        many = b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x-many: 1\r\n" * (1 << 20)
        answer = _send(server, many)
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")
        assert psutil.Process(server.process.pid).memory_info().rss - before < 32 << 20
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_that_arrive_in_pieces_or_together_are_answered(tmp_path: Path) -> None:
    body = b'{"prompt": "' + b"x " * 100_000 + b'"}'
    post = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    request = post % len(body) + body
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: %b\r\nconnection: close\r\n\r\n" % (b"x" * 30_000)
    with running_server(tmp_path / "data") as server:
        answer = _send(server, request * 5 + last)
        assert answer.count(b"HTTP/1.1 200 ") == 6
