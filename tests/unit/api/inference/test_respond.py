"""How much is encoded on the event loop, and when a request is over."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loraserve.api.app import create_app
from loraserve.api.inference.respond import size_of
from loraserve.engine.request import TokenLogprob
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.tokenizer import INLINE_SIZE
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings


def delta(num_tokens: int, num_alternatives: int | None = None) -> ChoiceDelta:
    top = [(1, -1.0)] * (num_alternatives or 0)
    logprobs = [] if num_alternatives is None else [TokenLogprob(1, -1.0, 1, top)] * num_tokens
    return ChoiceDelta(0, 0, token_ids=[1] * num_tokens, logprobs=logprobs)


def test_alternatives_count_like_tokens() -> None:
    assert size_of([delta(3), delta(2)]) == 5
    assert size_of([delta(10, 0)]) == 20
    assert size_of([delta(10, 20)]) == 220


def test_a_stream_step_is_encoded_inline_but_a_long_answer_is_not() -> None:
    assert size_of([delta(1, 20)] * 8) < INLINE_SIZE < size_of([delta(4000, 20)])


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": 3}},
}


async def told(live: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks that a stream sends, and "over" when its request is over, in order."""
    order: list[str] = []
    settle, calls = live.context.calls.settle, live.context.calls
    monkeypatch.setattr(calls, "settle", lambda work: (order.append("over"), settle(work)))
    fields = PROMPTS[path] if path == "/generate_stream" else {"model": "tiny", "stream": True, **PROMPTS[path]}
    body, ended = json.dumps(fields).encode(), asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await ended.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            order.append(message["body"].decode())
        if message["type"] == "http.response.body" and not message["more_body"]:
            ended.set()

    head = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    scope: Any = {"type": "http", "scheme": "http", "root_path": "", "client": None, **head}
    await create_app(live.context)(scope, receive, send)
    return order


@pytest.mark.parametrize("path", PROMPTS)
def test_a_request_is_over_before_the_end_of_its_stream_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with live_server(FakeEngine(), make_settings(tmp_path)) as live:
        *earlier, last = live.run(told(live, path, monkeypatch))
    assert earlier[-1] == "over"
    assert earlier.count("over") == 1
    assert "[DONE]" in last or '"length"' in last or "response.incomplete" in last
