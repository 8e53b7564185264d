import io
import json
import sys

import httpx
import pytest

from loraserve.cli.chat_session import ChatError, ChatOptions, ChatSession, Piece, run_chat

MODELS = {"data": [{"id": "base"}, {"id": "adapter"}]}


class Server:
    """Answers every chat with `events` and records the bodies it received."""

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
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in self._events]
        return httpx.Response(200, text="".join([*lines, ": ping\n\n", "data: [DONE]\n\n"]))


def piece(text: str) -> dict:
    return {"choices": [{"delta": {"content": text}}]}


def thought(text: str) -> dict:
    return {"choices": [{"delta": {"reasoning_content": text, "reasoning": text}}]}


def session(server: Server, model: str | None = None, system: str | None = None, **options: bool) -> ChatSession:
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://server")
    return ChatSession(client, model, system, ChatOptions(**options))


def test_starts_with_the_base_model() -> None:
    assert session(Server([])).model == "base"


def test_an_answer_is_streamed_and_added_to_the_conversation() -> None:
    server = Server([{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, piece("he"), piece("llo")])
    chat = session(server, "adapter", "be brief")
    assert list(chat.ask("hi")) == [Piece("he"), Piece("llo")]
    assert list(chat.ask("again")) == [Piece("he"), Piece("llo")]
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


def test_an_answer_may_contain_unicode_line_separators() -> None:
    text = "one\u2028two\u2029three\x85é🙂"
    assert list(session(Server([piece(text)])).ask("hi")) == [Piece(text)]


def test_reasoning_is_sent_back_with_its_answer() -> None:
    server = Server([{"choices": [{"delta": {"role": "assistant"}}]}, thought("h"), thought("m"), piece("4")])
    chat = session(server)
    assert list(chat.ask("2 + 2?")) == [Piece("h", is_reasoning=True), Piece("m", is_reasoning=True), Piece("4")]
    list(chat.ask("sure?"))
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "hm"},
        {"role": "user", "content": "sure?"},
    ]


def test_an_answer_stopped_during_reasoning_keeps_the_reasoning() -> None:
    server = Server([thought("h"), thought("m"), piece("4")])
    chat = session(server)
    answer = chat.ask("one")
    next(answer)
    answer.close()
    list(chat.ask("two"))
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "", "reasoning_content": "h"}


def test_single_turn_sends_each_message_alone() -> None:
    server = Server([piece("x")])
    chat = session(server, single_turn=True)
    for text in ("one", "two"):
        list(chat.ask(text))
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["two"]


def test_a_stopped_answer_keeps_the_text_received_so_far() -> None:
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
def test_a_refused_message_is_removed_from_the_conversation(events: list[dict], status: int) -> None:
    server = Server(events, status)
    chat = session(server)
    for text in ("one", "two"):
        with pytest.raises(ChatError, match="no"):
            list(chat.ask(text))
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["two"]


@pytest.mark.parametrize("answer", ["<html>", "[]", "{}", '{"data": []}', '{"data": null}'])
def test_a_server_that_lists_no_models_is_reported(answer: str) -> None:
    other = httpx.MockTransport(lambda _: httpx.Response(200, text=answer))
    with pytest.raises(ChatError, match=r"^http://server/v1/models lists no models: does the server at --url"):
        ChatSession(httpx.Client(transport=other, base_url="http://server"), None, None, ChatOptions())


def test_an_unreachable_server_is_reported() -> None:
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


class TestThoughts:
    @pytest.fixture(autouse=True)
    def _thinking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        self.chat = session(Server([thought("h[m]"), thought(":ok:"), piece("a[b]\tc"), piece(":ok:")]))

    def test_are_dim_before_the_answer_on_a_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert run_chat(self.chat) == 0
        assert capsys.readouterr().out == "\x1b[2mh[m]\x1b[0m\x1b[2m:ok:\x1b[0m\n\na[b]\tc:ok:\n" * 2

    def test_are_not_printed_without_a_terminal_even_if_color_is_forced(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert run_chat(self.chat) == 0
        assert capsys.readouterr().out == "a[b]\tc:ok:\n" * 2
