"""A conversation with a running server: messages in, streamed text out, commands in between."""

import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.text import Text

from loraserve.cli.http_client import http_client
from loraserve.cli.proxy import through_proxy

CONNECT_TIMEOUT_S = 5.0
DATA = "data: "
HELP = """\
/model          list the models
/model NAME     talk to another adapter, or to the base model
/system TEXT    set the system prompt; without TEXT: none
/clear          forget the conversation
/exit           leave (also Ctrl-D); Ctrl-C stops an answer"""


class ChatError(Exception):
    """The server cannot be reached, or refused a request. The message is shown to the user."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    temperature: float | None = None
    max_tokens: int | None = None
    single_turn: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


def connect(url: str, api_key: str | None) -> httpx.Client:
    return http_client(url, api_key, httpx.Timeout(None, connect=CONNECT_TIMEOUT_S))


class ChatSession:
    """Keeps the conversation and sends its requests."""

    def __init__(self, client: httpx.Client, model: str | None, system: str | None, options: ChatOptions) -> None:
        """Raises `ChatError`."""
        self._client = client
        self._options = options
        self._turns: list[dict[str, str]] = []
        self.system = system
        self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """The base model first; never empty. Raises `ChatError`."""
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            base_url = str(self._client.base_url)
            message = f"{base_url} does not answer{through_proxy(base_url)} ({error}); is the server running?"
            raise ChatError(message) from error
        _raise_for_error(response)
        try:
            first, *others = (card["id"] for card in response.json()["data"])
        except (ValueError, KeyError, TypeError):
            raise ChatError(f"{response.url} lists no models: does the server at --url have OpenAI's API?") from None
        return [first, *others]

    def clear(self) -> None:
        self._turns.clear()

    def ask(self, text: str) -> Generator[Piece]:
        """Yields the answer as it arrives. What arrived stays in the conversation, even if the answer is stopped.

        Raises `ChatError`.
        """
        if self._options.single_turn:
            self.clear()
        self._turns.append({"role": "user", "content": text})
        pieces: list[Piece] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self._turns.append(_turn(pieces))
            else:
                self._turns.pop()

    def _stream(self) -> Iterator[Piece]:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=self._body()) as response:
                if response.status_code != 200:
                    response.read()
                _raise_for_error(response)
                yield from _pieces(_lines(response.iter_bytes()))
        except httpx.HTTPError as error:
            raise ChatError(f"the connection was lost: {error}") from error

    def _body(self) -> dict[str, object]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        chosen = {"temperature": self._options.temperature, "max_tokens": self._options.max_tokens}
        return {
            "model": self.model,
            "messages": system + self._turns,
            "stream": True,
            **{name: value for name, value in chosen.items() if value is not None},
        }


def _turn(pieces: list[Piece]) -> dict[str, str]:
    """The reasoning is sent back too: the chat template decides whether the model sees it again."""
    content, reasoning = (
        "".join(piece.text for piece in pieces if piece.is_reasoning is is_reasoning) for is_reasoning in (False, True)
    )
    turn = {"role": "assistant", "content": content}
    return {**turn, "reasoning_content": reasoning} if reasoning else turn


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Splits at line feeds only: httpx also splits at U+2028 and others, which JSON may contain unescaped."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode().rstrip("\r") for line in lines)


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        if not line.startswith(DATA) or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix(DATA))
        if "error" in event:
            raise ChatError(event["error"]["message"])
        for choice in event["choices"]:
            if reasoning := choice["delta"].get("reasoning_content"):
                yield Piece(reasoning, is_reasoning=True)
            if content := choice["delta"].get("content"):
                yield Piece(content)


def _raise_for_error(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        through = through_proxy(str(response.url))
        raise ChatError(f"{response.text[:200]} (HTTP {response.status_code}{through})") from None
    raise ChatError(f"{message} (HTTP {response.status_code})")


def run_chat(session: ChatSession) -> int:
    """Runs until /exit or the end of input. Returns the exit code. Raises `ChatError` if stdin is not a terminal."""
    console = Console(highlight=False)
    if sys.stdin.isatty():
        return _Terminal(session, console).run()
    for line in sys.stdin:
        _show(session.ask(line.rstrip("\n")), console)
        print()
    return 0


def _show(answer: Iterator[Piece], console: Console) -> None:
    """Prints the answer; on a terminal, the reasoning before it in dim text."""
    has_thought = False
    for piece in answer:
        if not piece.is_reasoning:
            print("\n\n" * has_thought + piece.text, end="", flush=True)
            has_thought = False
        elif sys.stdout.isatty():
            console.print(Text(piece.text, "dim"), end="", soft_wrap=True)
            has_thought = True


class _Terminal:
    def __init__(self, session: ChatSession, console: Console) -> None:
        self._session = session
        self._console = console

    def run(self) -> int:
        self._console.print(f"Talking to [bold]{self._session.model}[/]. /help lists the commands.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self._answer(line)
        return 0

    def _read(self) -> str | None:
        """None at the end of the input."""
        try:
            return self._console.input(f"[bold cyan]{self._session.model}>[/] ").strip()
        except KeyboardInterrupt:
            self._console.print()
            return ""
        except EOFError:
            self._console.print()
            return None

    def _answer(self, text: str) -> None:
        answer = self._session.ask(text)
        try:
            _show(answer, self._console)
        except KeyboardInterrupt:
            # Closing the connection makes the server stop too.
            answer.close()
            self._console.print(" [dim](stopped)[/]", end="")
        except ChatError as error:
            self._console.print(str(error), style="red", markup=False, end="")
        self._console.print()

    def _command(self, line: str) -> bool:
        """False to leave."""
        name, _, argument = line.partition(" ")
        match name, argument.strip():
            case (("/exit" | "/quit"), _):
                return False
            case "/model", chosen:
                self._choose_model(chosen)
            case "/system", text:
                self._session.system = text or None
            case "/clear", _:
                self._session.clear()
            case _:
                self._console.print(HELP, markup=False)
        return True

    def _choose_model(self, chosen: str) -> None:
        try:
            models = self._session.models()
        except ChatError as error:
            self._console.print(str(error), style="red", markup=False)
            return
        if chosen in models:
            self._session.model = chosen
            # The new model would take another adapter's turns for its own.
            self._session.clear()
            return
        if chosen:
            self._console.print(f"There is no model {chosen!r}.", markup=False, style="red")
        self._console.print("  ".join(models), markup=False)
