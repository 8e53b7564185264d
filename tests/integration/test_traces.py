"""Spans as a collector receives them from a real server, and servers without a working collector."""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.management import add_adapter, client, complete, fake_adapter, new_key, offline_admin_key
from tests.support.otlp_collector import attributes_of, running_collector
from tests.support.server_process import WAIT_S, ServerProcess, run_command, serve, serve_fake, stop, wait_until

FLAG = "--otlp-traces-endpoint"
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=here"}
PHASES = ["queue", "prefill", "decode"]
NEVER_ENDING = 1 << 25
END_S = 15.0
"""An idle server stops in one second; OpenTelemetry's SDK on its own would wait 30 s for its collector."""


def has(span: Span, expected: Mapping[str, Any]) -> bool:
    attributes = attributes_of(span)
    return {name: attributes.get(name) for name in expected} == expected


def assert_in_order(span: Span, phases: Mapping[str, Span]) -> None:
    """The phases follow one another, within the request's span."""
    times = [span.start_time_unix_nano]
    for phase in phases.values():
        times += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    times.append(span.end_time_unix_nano)
    assert times == sorted(times)
    assert {phase.trace_id for phase in phases.values()} == {span.trace_id}


def usage_of_stream(url: str, body: dict[str, Any]) -> dict[str, int]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(url, json=asked, timeout=WAIT_S)
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    return json.loads(events[-2])["usage"]


def lines_with(server: ServerProcess, text: str) -> list[str]:
    return [line for line in server.output if text in line]


def peer_ports(process: psutil.Process) -> list[int]:
    return [connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr]


def without_packages(folder: Path) -> dict[str, str]:
    """Environment variables that make the `otel` extra look uninstalled."""
    package = folder / "opentelemetry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(folder), *(path for path in sys.path if path)])
    return {"PYTHONPATH": path}


def test_a_request_is_one_span_under_its_caller_with_its_phases_as_children(tmp_path: Path) -> None:
    variables = {**AT_ONCE, "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    with running_collector() as collector:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        with serve(tmp_path, variables=variables) as server:
            asked = {"model": "uppercase", "messages": [{"role": "user", "content": "hello world"}], "temperature": 0}
            headers = {**CALLER, "user-agent": "secret-agent", "authorization": "Bearer sk-secret"}
            whole = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=headers, timeout=WAIT_S)
            streamed = {"prompt": ["hello world", "hello"], "n": 2, "max_tokens": 9}
            usage = usage_of_stream(f"{server.url}/adapters/reverse/v1/completions", streamed)
            lorax = httpx.post(f"{server.url}/generate", json={"inputs": "hello world"}, timeout=WAIT_S)
            of_chat, of_stream, of_lorax = collector.wait_for(3)
            stop(server)
    answer, chat = whole.json()["choices"][0]["message"]["content"], whole.json()["usage"]
    assert answer == "HELLO WORLD"
    sent = b"".join(collector.bodies)
    assert not [text for text in ("hello", answer, "secret") if text.encode() in sent]
    assert (of_chat.trace_id.hex(), of_chat.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert of_chat.trace_state == "vendor=here"
    assert (of_stream.trace_id.hex() == TRACE_ID, of_stream.parent_span_id) == (False, b"")
    assert has(
        of_chat,
        {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "uppercase",
            "gen_ai.response.model": "uppercase@v1",
            "gen_ai.request.temperature": 0.0,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.input_tokens": chat["prompt_tokens"],
            "gen_ai.usage.output_tokens": chat["completion_tokens"],
            "loraserve.request_id": whole.headers["x-request-id"],
            "loraserve.adapter.name": "uppercase",
            "loraserve.adapter.version": 1,
            "loraserve.tenant": "default",
            "loraserve.outcome": "completed",
        },
    )
    assert re.fullmatch("[0-9a-f]{12}", attributes_of(of_chat)["loraserve.adapter.digest"])
    assert has(
        of_stream,
        {
            "http.route": "/adapters/{adapter}/v1/completions",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "reverse",
            "gen_ai.request.choice.count": 2,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "loraserve.adapter.name": "reverse",
        },
    )
    assert len(attributes_of(of_stream)["gen_ai.response.finish_reasons"]) == 4
    of_base = {"gen_ai.response.model": "loraserve-demo", "loraserve.adapter.name": None}
    assert has(of_lorax, {"http.route": "/generate", "http.response.status_code": lorax.status_code, **of_base})
    for span in (of_chat, of_stream, of_lorax):
        assert span.status.code == Status.STATUS_CODE_UNSET
        phases = collector.children_of(span)
        assert [name for name in phases if name != "adapter load"] == PHASES
        assert_in_order(span, phases)
    resource = collector.resource()
    assert resource["service.name"] == "loraserve"
    assert resource["deployment.environment.name"] == "test"


def test_spans_report_the_outcome_and_only_server_faults_are_errors(tmp_path: Path) -> None:
    key = offline_admin_key(tmp_path)
    variables = {**AT_ONCE, "OTEL_SERVICE_NAME": "tenants"}
    with running_collector() as collector, serve_fake(tmp_path, FLAG, collector.url, variables=variables) as server:
        with client(server, key) as admin:
            add_adapter(admin, "sql", fake_adapter(tmp_path / "folder", 1))
            limits = {"requests_per_min": 1}
            limited = new_key(admin, "default", "infer", name="limited", limits=limits)["secret"]
            answers = [httpx.post(f"{server.url}/v1/completions", json={}), complete(admin, "missing")]
            with client(server, limited) as tenant:
                answers += [complete(tenant, "sql"), complete(tenant, "sql")]
            body = {"model": "fake", "prompt": [1], "max_tokens": NEVER_ENDING, "stream": True}
            with admin.stream("POST", "/v1/completions", json=body) as left:
                next(left.iter_lines())
            with admin.stream("POST", "/v1/completions", json=body) as ended:
                next(lines := ended.iter_lines())
                admin.delete(f"/v1/requests/{ended.headers['x-request-id']}")
                assert "request_aborted" in "".join(lines)
            collector.wait_for(6)
            with admin.stream("POST", "/v1/completions", json=body) as failed:
                next(lines := failed.iter_lines())
                server.engine().kill()
                assert "engine_dead" in "".join(lines)
        assert server.wait() == 1
        spans = collector.wait_for(7)
        # Management requests and requests without a route are not inference requests.
        assert len(spans) == 7
    assert [answer.status_code for answer in answers] == [401, 404, 200, 429]
    codes = ["invalid_api_key", "model_not_found", None, "rate_limit_exceeded", None, "request_aborted", "engine_dead"]
    assert [attributes_of(span).get("error.type") for span in spans] == codes
    outcomes = ["refused", "refused", "completed", "refused", "aborted", "aborted", "failed"]
    assert [attributes_of(span)["loraserve.outcome"] for span in spans] == outcomes
    assert [span.status.code == Status.STATUS_CODE_ERROR for span in spans] == [False] * 6 + [True]
    assert spans[-1].status.message == "engine_dead"
    refused = spans[3]
    assert has(refused, {"loraserve.tenant": "default", "loraserve.adapter.name": "sql", "gen_ai.request.model": "sql"})
    assert not collector.children_of(refused)
    assert "loraserve.tenant" not in attributes_of(spans[0])
    assert collector.resource()["service.name"] == "tenants"


def test_a_refusing_collector_logs_one_line_and_its_recovery_another(tmp_path: Path) -> None:
    with running_collector() as collector, serve_fake(tmp_path, FLAG, collector.url, variables=AT_ONCE) as server:
        collector.status = 404
        # The SDK would warn about this with each request and quote it.
        unreadable = {**CALLER, "tracestate": "@a state that is none@"}
        with httpx.Client(base_url=server.url, timeout=WAIT_S, headers=unreadable) as http:
            for num_posted in range(1, 4):
                assert complete(http, "fake").status_code == 200
                wait_until(lambda n=num_posted: len(collector.paths) >= n, "a batch was posted")
            collector.status = 200
            assert complete(http, "fake").status_code == 200
        collector.wait_for(1)
        wait_until(lambda: bool(lines_with(server, "again")), "it says that the collector is back")
        stop(server)
    assert len(lines_with(server, "traces do not reach")) == 1
    assert "404" in lines_with(server, "traces do not reach")[0]
    assert len(lines_with(server, "spans were lost")) == 1
    assert "that is none" not in server.text


def test_a_silent_collector_delays_neither_requests_nor_the_shutdown(tmp_path: Path) -> None:
    key = offline_admin_key(tmp_path)
    batches = {**AT_ONCE, "OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with silent, serve_fake(tmp_path, FLAG, url, variables=batches) as server, client(server, key) as admin:
        assert complete(admin, "fake").status_code == 200
        connection, _ = silent.accept()
        with connection:
            # The engine, the upload reader and the private Redis are separate processes, started before or just now.
            add_adapter(admin, "sql", fake_adapter(tmp_path / "folder", 1))
            assert [complete(admin, "sql").status_code for _ in range(20)] == [200] * 20
            process = psutil.Process(server.process.pid)
            children = process.children(recursive=True)
            assert len(children) >= 3
            assert port in peer_ports(process)
            assert not [child for child in children if port in peer_ports(child)]
            process.terminate()
            assert server.process.wait(END_S) == 0
    assert len(lines_with(server, "Queue full")) == 1
    assert lines_with(server, "the last traces were not sent")
    assert "Traceback" not in server.text


def test_without_the_packages_only_the_traces_flag_prevents_the_start(tmp_path: Path) -> None:
    without = without_packages(tmp_path / "shadow")
    done = run_command("serve", "--data-dir", str(tmp_path), FLAG, "http://localhost:4318", variables=without)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: {FLAG}: traces need additional packages: pip install 'loraserve[otel]'"
    variables = {**without, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    with serve_fake(tmp_path, variables=variables) as server:
        with httpx.Client(base_url=server.url) as http:
            assert complete(http, "fake").status_code == 200
        stop(server)
    (line,) = lines_with(server, "OTEL_EXPORTER_OTLP_ENDPOINT")
    assert line.startswith("no traces are sent, although ")
    assert line.endswith("pip install 'loraserve[otel]'")
