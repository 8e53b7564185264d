import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich_click as click

from loraserve.cli.batches.batch_requests import MAX_SHOWN, check_requests
from loraserve.cli.batches.run_batch import BatchSettings

LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "temperature": 0.10, "messages": []},
}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    file = path / "requests.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def fault(path: Path, *lines: dict[str, Any] | str) -> str:
    with pytest.raises(click.ClickException) as refused:
        check_requests(written(path, *lines))
    return refused.value.message


def test_requests_are_read_in_order_and_blank_lines_skipped(tmp_path: Path) -> None:
    lines = {**LINE, "custom_id": "b"}, "", " \t", LINE
    found = check_requests(written(tmp_path, *lines))
    assert found.custom_ids == {"a", "b"}
    assert [request.custom_id for request in found.requests()] == ["b", "a"]


def test_a_body_is_sent_byte_for_byte(tmp_path: Path) -> None:
    line = '{"custom_id":"a","url":"/v1/completions","body":{"model":"m","seed":12345678901234567890,"top_p":0.10}}'
    (request,) = check_requests(written(tmp_path, line)).requests()
    assert request.content({}) == b'{"model":"m","seed":12345678901234567890,"top_p":0.10}'


def test_options_that_are_given_become_fields() -> None:
    settings = BatchSettings(Path("r"), Path("a"), None, None, False, 1, 1.0, 1.0, "http://x", None, None)
    assert settings.fields == {}
    assert replace(settings, model="sql", priority=0).fields == {"model": "sql", "priority": 0}


def test_given_fields_replace_those_of_each_line(tmp_path: Path) -> None:
    without = {**LINE, "custom_id": "b", "body": {"messages": []}}
    requests = check_requests(written(tmp_path, LINE, without)).requests()
    given = {"model": "sql@live", "priority": 7}
    contents = [json.loads(request.content(given)) for request in requests]
    assert contents == [{**LINE["body"], **given}, {"messages": [], **given}]


@pytest.mark.parametrize(
    "url",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/classify", "/v1/score", "/v1/rerank", "/v2/rerank", "/adapters/sql/v1/chat/completions"),
        *("/classify", "/score", "/rerank", "/adapters/sql/rerank"),
    ],
)
def test_urls_of_inference_routes_are_accepted(url: str, tmp_path: Path) -> None:
    assert check_requests(written(tmp_path, {**LINE, "url": url})).custom_ids == {"a"}


@pytest.mark.parametrize(
    "url",
    [
        *("/v1/keys", "/v1/adapters", "v1/completions", "//evil/v1/completions", "http://evil/v1/completions", ""),
        *("/v1/completions?x", "/v1/completions/", "/adapters/a/b/v1/completions", "/v1/messages/count_tokens"),
    ],
)
def test_other_urls_are_refused(url: str, tmp_path: Path) -> None:
    assert f"line 1: url {url!r} is not a supported endpoint" in fault(tmp_path, {**LINE, "url": url})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": ""}, "length >= 1"),
        ({"custom_id": 1}, "Expected `str`, got `int`"),
        ({"method": "GET"}, "Invalid enum value 'GET'"),
        ({"body": []}, "Expected `object`, got `array`"),
        ({"priority": 1}, "unknown field `priority`"),
        ({"body": {"model": "m", "stream": True}}, "stream must be false"),
    ],
)
def test_a_malformed_request_is_reported_with_its_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    told = fault(tmp_path, {**LINE, "custom_id": "other"}, "", {**LINE, **change})
    assert "requests.jsonl, line 3: " in told
    assert message in told


@pytest.mark.parametrize("off", [False, None])
def test_stream_may_be_false_or_null(off: bool | None, tmp_path: Path) -> None:
    body = {**LINE["body"], "stream": off}
    assert check_requests(written(tmp_path, {**LINE, "body": body})).custom_ids == {"a"}


def test_a_duplicate_custom_id_is_reported_with_both_lines(tmp_path: Path) -> None:
    assert "line 3: custom_id 'a' is also on line 1" in fault(tmp_path, LINE, {**LINE, "custom_id": "b"}, LINE)


def test_only_the_first_faults_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    told = fault(tmp_path, *["{"] * (MAX_SHOWN + 2)).splitlines()
    assert len(told) == MAX_SHOWN + 1
    assert "line 1:" in told[0]
    assert told[-1] == "and 2 more"


def test_a_body_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    body = '{"a":' + "[" * 10**5 + "]" * 10**5 + "}"
    assert fault(tmp_path, f'{{"custom_id":"a","url":"/v1/completions","body":{body}}}').endswith("nested too deeply")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_requests_is_refused(content: str, tmp_path: Path) -> None:
    assert "has no requests" in fault(tmp_path, *content.splitlines())


@pytest.mark.parametrize("place", ["custom_id", "url", "body"])
def test_invalid_utf_8_is_reported_with_its_line(place: str, tmp_path: Path) -> None:
    line = {**LINE, "body": {"model": "m", "prompt": "XX"}}
    path = written(tmp_path, line if place == "body" else {**line, place: "XX"})
    path.write_bytes(path.read_bytes().replace(b"XX", b"\xfc"))
    with pytest.raises(click.ClickException, match=r"line 1: .*utf-8.* can't decode byte 0xfc"):
        check_requests(path)


def test_a_file_deleted_after_the_check_is_reported(tmp_path: Path) -> None:
    found = check_requests(written(tmp_path, LINE))
    found.path.unlink()
    with pytest.raises(click.ClickException, match=r"has changed: .*No such file"):
        list(found.requests())


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    path = written(tmp_path, LINE)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    found = check_requests(path)
    assert [request.custom_id for request in found.requests()] == ["a"]


def test_a_pipe_is_refused_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(click.ClickException, match="cannot be read twice"):
        check_requests(pipe)


def test_a_file_changed_after_the_check_is_reported(tmp_path: Path) -> None:
    found = check_requests(written(tmp_path, LINE))
    written(tmp_path, "{")
    with pytest.raises(click.ClickException, match="has changed: "):
        list(found.requests())
