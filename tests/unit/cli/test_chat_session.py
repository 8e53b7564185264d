import io
import json
import sys

import httpx
import pytest

from loraserve.cli.chat_session import ChatError, ChatOptions, ChatSession, run_chat

MODELS = {"data": [{"id": "base"}, {"id": "adapter"}]}


class Server:
    """Answers every chat with `events` and keeps what it was sent."""

    def __init__(self, events: list[dict], status: int = 200) -> None:
        self.bodies: list[dict] = []
        self._events = events
        self._status = status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        self.bodies.append(json.loads(request.content))
        if self._status != 200:
            return httpx.Response(self._status, json=self._events[0])
        lines = [f"data: {json.dumps(event)}\n\n" for event in self._events]
        return httpx.Response(200, text="".join([*lines, ": ping\n\n", "data: [DONE]\n\n"]))


def piece(text: str) -> dict:
    return {"choices": [{"delta": {"content": text}}]}


def session(server: Server, model: str | None = None, system: str | None = None, **options: bool) -> ChatSession:
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://server")
    return ChatSession(client, model, system, ChatOptions(**options))


def test_starts_with_the_base_model() -> None:
    assert session(Server([])).model == "base"


def test_answer_streams_and_joins_the_conversation() -> None:
    server = Server([{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, piece("he"), piece("llo")])
    chat = session(server, "adapter", "be brief")
    assert list(chat.ask("hi")) == ["he", "llo"]
    assert list(chat.ask("again")) == ["he", "llo"]
    assert server.bodies[1] == {
        "model": "adapter",
        "stream": True,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "again"},
        ],
    }


def test_single_turn_sends_each_message_alone() -> None:
    server = Server([piece("x")])
    chat = session(server, single_turn=True)
    for text in ("one", "two"):
        list(chat.ask(text))
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["two"]


def test_stopped_answer_keeps_what_came() -> None:
    server = Server([piece("a"), piece("b")])
    chat = session(server)
    answer = chat.ask("one")
    next(answer)
    answer.close()
    list(chat.ask("two"))
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["one", "a", "two"]


@pytest.mark.parametrize(
    ("events", "status"), [([{"error": {"message": "no"}}], 404), ([{"error": {"message": "no"}}], 200)]
)
def test_refused_message_is_forgotten(events: list[dict], status: int) -> None:
    server = Server(events, status)
    chat = session(server)
    for text in ("one", "two"):
        with pytest.raises(ChatError, match="no"):
            list(chat.ask(text))
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["two"]


def test_unreachable_server_is_said_plainly() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://server")
    with pytest.raises(ChatError, match="is the server running"):
        ChatSession(client, None, None, ChatOptions())


def test_without_a_terminal_each_line_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/two\n"))
    server = Server([piece("x"), piece("y")])
    assert run_chat(session(server)) == 0
    assert capsys.readouterr().out == "xy\nxy\n"
    assert server.bodies[1]["messages"][-1]["content"] == "/two"
