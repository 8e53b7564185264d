"""The commands other than `serve`, run as processes against a real server."""

import json
import socket
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.support.demo_questions import ADAPTERS
from tests.support.server_process import ServerProcess, run_command


class TestChat:
    def test_every_line_is_a_message_and_only_answers_are_printed(self, server: ServerProcess) -> None:
        talked = run_command(
            "chat",
            "--url",
            server.url,
            "--model",
            "spell",
            "--temperature",
            "0",
            "--single-turn",
            stdin="cat\nhello world\n",
        )
        assert (talked.returncode, talked.stdout, talked.stderr) == (0, "c-a-t\nh-e-l-l-o w-o-r-l-d\n", "")

    def test_the_base_model_is_the_default(self, server: ServerProcess) -> None:
        talked = run_command("chat", "--url", server.url, "--temperature", "0", stdin="hello world\n")
        assert talked.stdout == "You said: hello world\n"

    def test_an_unknown_model_or_an_absent_server_is_reported_without_a_traceback(self, server: ServerProcess) -> None:
        unknown = run_command("chat", "--url", server.url, "--model", "nope", stdin="hi\n")
        assert unknown.returncode == 1
        assert "The model 'nope' does not exist" in unknown.stderr
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        absent = run_command("chat", "--url", url, stdin="hi\n")
        assert absent.returncode == 1
        assert url in absent.stderr
        for ended in (unknown, absent):
            assert "Traceback" not in ended.stderr


class TestBench:
    def test_bench_measures_adapters_and_writes_json(self, server: ServerProcess, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        measured = run_command(
            *("bench", server.url, "--num-requests", "12", "--concurrency", "6", "--json", str(file)),
            *("--prompt-tokens", "20", "--output-tokens", "5", "--distribution", "zipf"),
        )
        assert measured.returncode == 0, measured.stderr
        report: Any = json.loads(file.read_text())
        total = report["total"]
        assert (total["num_requests"], total["num_failed"], total["output_tokens"]) == (12, 0, 60)
        assert {"ttft_ms", "itl_ms", "e2e_ms"} <= total.keys()
        assert total["ttft_ms"].keys() == {"mean", "p50", "p90", "p99", "max"}
        assert sum(model["num_requests"] for model in report["by_model"].values()) == 12
        assert set(report["by_model"]) <= set(ADAPTERS)

    def test_bench_can_send_an_open_loop_to_the_base_alone(self, server: ServerProcess) -> None:
        measured = run_command(
            *("bench", server.url, "--adapters", "base", "--num-requests", "4", "--request-rate", "50"),
            *("--prompt-tokens", "8", "--output-tokens", "64", "--chat"),
        )
        assert measured.returncode == 0, measured.stderr
        assert "ITL" in measured.stdout

    def test_bench_reports_cold_adapters_and_shared_prefixes_and_writes_a_plot(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        report_file, plot_file = tmp_path / "report.json", tmp_path / "plot.svg"
        measured = run_command(
            *("bench", f"{server.url}/v1", "--cold", "--num-requests", "18", "--prefixes", "1"),
            *("--prefix-tokens", "64", "--prompt-tokens", "8", "--output-tokens", "3"),
            *("--json", str(report_file), "--plot", str(plot_file)),
        )
        assert measured.returncode == 0, measured.stderr
        report: Any = json.loads(report_file.read_text())
        assert report["settings"]["server"] == "loraserve"
        assert report["cold"]["first_use"]["num_requests"] == len(ADAPTERS)
        assert report["cold"]["later"]["num_requests"] == 18 - len(ADAPTERS)
        assert report["total"]["cached_tokens"] > 0
        assert "first use" in plot_file.read_text()

    def test_bench_counts_failures_by_code(self, server: ServerProcess, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        measured = run_command(
            *("bench", server.url, "--adapters", "spell,nope", "--num-requests", "4", "--json", str(file)),
            *("--prompt-tokens", "8", "--output-tokens", "3"),
        )
        assert measured.returncode == 1
        assert "HTTP 404 model_not_found" in measured.stdout
        report: Any = json.loads(file.read_text())
        assert report["by_model"]["nope"]["errors"] == {"HTTP 404 model_not_found": 2}
        assert report["by_model"]["spell"]["num_failed"] == 0


class TestBatch:
    def test_a_batch_sends_requests_to_many_adapters_and_endpoints(self, server: ServerProcess, tmp_path: Path) -> None:
        chats = {
            adapter: _line(adapter, "chat/completions", model=adapter, messages=[{"role": "user", "content": "hello"}])
            for adapter in ("uppercase", "reverse", "rot13", "spell")
        }
        others = (
            _line("embedded", "embeddings", model="reverse", input="hello"),
            _line("unknown", "completions", model="nope", prompt="hello"),
            {
                **_line("its own", "messages", max_tokens=9, messages=[{"role": "user", "content": "hello"}]),
                "url": "/adapters/reverse/v1/messages",
            },
        )
        sent = run_batch(server, tmp_path, *chats.values(), *others)
        assert sent.returncode == 1
        assert "6 of 7 answered, 1 failed (1 HTTP 404 model_not_found)" in sent.stderr
        answers = answers_in(tmp_path)
        said = {name: answers[name]["response"]["body"]["choices"][0]["message"]["content"] for name in chats}
        assert said == {"uppercase": "HELLO", "reverse": "olleh", "rot13": "uryyb", "spell": "h-e-l-l-o"}
        assert answers["its own"]["response"]["body"]["content"][0]["text"] == "olleh"
        assert len(answers["embedded"]["response"]["body"]["data"][0]["embedding"]) > 0
        assert answers["unknown"]["response"]["status_code"] == 404
        assert all(answer["response"]["request_id"] and answer["error"] is None for answer in answers.values())

    def test_options_override_the_fields_in_the_file(self, server: ServerProcess, tmp_path: Path) -> None:
        line = _line("a", "chat/completions", model="uppercase", messages=[{"role": "user", "content": "hello"}])
        options = ("--model", "reverse", "--priority", "1")
        assert run_batch(server, tmp_path, line, options=options).returncode == 0
        (answer,) = answers_in(tmp_path).values()
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "olleh"

    def test_an_invalid_line_is_reported_and_no_output_file_is_created(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        refused = run_batch(server, tmp_path, _line("a", "completions", model="spell", prompt="x"), {"custom_id": "b"})
        assert refused.returncode == 1
        assert "requests.jsonl, line 2: " in " ".join(refused.stderr.replace("│", " ").split())
        assert not (tmp_path / "answers.jsonl").exists()


def _line(custom_id: str, endpoint: str, **body: Any) -> dict[str, Any]:
    body = body if endpoint == "embeddings" else {"temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{endpoint}", "body": body}


def run_batch(
    server: ServerProcess, folder: Path, *lines: dict[str, Any], options: tuple[str, ...] = ()
) -> CompletedProcess[str]:
    requests = folder / "requests.jsonl"
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run_command("batch", str(requests), str(folder / "answers.jsonl"), "--url", server.url, *options)


def answers_in(folder: Path) -> dict[str, Any]:
    """By custom_id."""
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers)
    return by_id


class TestDoctor:
    def test_doctor_reports_as_json(self, data_dir: Path, server: ServerProcess) -> None:
        looked = run_command("doctor", "--json", "--port", "0", "--data-dir", str(data_dir))
        checks = json.loads(looked.stdout)
        assert looked.returncode == 0, checks
        assert {"name", "status", "found", "remedy"} <= checks[0].keys()
        assert not [check for check in checks if check["status"] == "fail"]

    def test_a_taken_port_fails_with_a_remedy(self, data_dir: Path, server: ServerProcess) -> None:
        port = server.url.rpartition(":")[2]
        looked = run_command("doctor", "--json", "--port", port, "--data-dir", str(data_dir))
        assert looked.returncode == 1
        (failed,) = (check for check in json.loads(looked.stdout) if check["status"] == "fail")
        assert port in failed["found"]
        assert "--port" in failed["found"] + failed["remedy"]


def test_help_and_version_succeed_and_print_only_to_stdout() -> None:
    for arguments in (("--help",), ("serve", "--help"), ("version",)):
        ended = run_command(*arguments)
        assert ended.returncode == 0
        assert ended.stdout
        assert ended.stderr == ""
