"""A crowd of clients, many of which disconnect midway: the others get everything, the disconnected hold nothing."""

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import openai
import psutil

from loraserve.live.connection import NUM_LINKS
from tests.support.demo_questions import (
    ADAPTER_DIR,
    ADAPTERS,
    MAX_BASE_TOKENS,
    content_of,
    events_of,
    questions,
    user,
)
from tests.support.server_process import WAIT_S, ServerProcess, wait_until

NUM_STREAMS = 200
LEAVING_SHARE = 0.3
ENDLESS_TOKENS = 900
TOKENS_UNTIL_NOTICED = 100
"""More than an endless sequence generates until its client's departure is noticed; far fewer than requested."""
POOLED_CONNECTIONS = NUM_LINKS + 4
"""Connections to the private Valkey, which a storm may open for good, and short-lived ones of the test's clients."""
SPARE_CONNECTIONS = 2
"""Connections of the test's own clients."""


@dataclass(slots=True)
class Ask:
    model: str
    prompt: str
    answer: str

    def body(self, **options: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "max_tokens": MAX_BASE_TOKENS}
        return {"model": self.model, "messages": user(self.prompt), **greedy, **options}


@dataclass(slots=True)
class Crowd:
    """Seeded, so that a failing storm can be reproduced."""

    url: str
    random: Random
    num_endless: int = 0
    """Endless sequences, whose clients do not wait for the end."""
    num_aborted: int = 0
    """Endless sequences that were certainly running when their client left."""
    stayed: list[tuple[Ask, str]] = field(default_factory=list)

    async def storm(self, asks: list[Ask]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, limits=limits) as client:
            leaving = set(self.random.sample(range(len(asks)), round(len(asks) * LEAVING_SHARE)))
            await asyncio.gather(
                *(self.leave(ask) if index in leaving else self.stay(client, ask) for index, ask in enumerate(asks))
            )

    async def stay(self, client: httpx.AsyncClient, ask: Ask) -> None:
        response = await client.post("/v1/chat/completions", json=ask.body(stream=True))
        assert response.status_code == 200, response.text
        events = events_of(response.text)
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        self.stayed.append((ask, content_of(events)))

    async def leave(self, ask: Ask) -> None:
        if self.random.random() < 0.2:
            await self._leave_stream(ask.body(stream=True), self.random.randint(1, 20))
            return
        n = self.random.choice((1, 1, 3))
        self.num_endless += n
        endless = {"ignore_eos": True, "max_tokens": ENDLESS_TOKENS, "n": n}
        match self.random.randrange(4):
            case 0:
                await self._leave_silently(ask.body(**endless), self.random.uniform(0, 0.1))
            case 1:
                await self._leave_silently(ask.body(stream=True, **endless), 0)
            case _:
                await self._leave_stream(ask.body(stream=True, **endless), self.random.randint(n, 9))
                self.num_aborted += n

    async def _leave_stream(self, body: dict[str, Any], num_events: int) -> None:
        """Disconnects after `num_events` events or at the end of the stream."""
        reader, writer = await self._send(body)
        while num_events and (line := await reader.readline()) != b"data: [DONE]\n":
            num_events -= line.startswith(b"data: ")
        self._hang_up(writer)

    async def _leave_silently(self, body: dict[str, Any], after_s: float) -> None:
        _, writer = await self._send(body)
        await asyncio.sleep(after_s)
        self._hang_up(writer)

    async def _send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(self.url).port)
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer

    def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        """Closes or aborts the connection, at random."""
        if self.random.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()


def test_disconnecting_clients_disturb_no_others_and_leave_nothing_behind(
    server: ServerProcess, http: httpx.Client, client: openai.OpenAI
) -> None:
    asks = [Ask(*question) for question in questions(-(-NUM_STREAMS // len(ADAPTERS)))][:NUM_STREAMS]
    api = psutil.Process(server.process.pid)
    wait_until(server.is_idle, "nothing runs before")
    calm, crowd = Crowd(server.url, Random(0)), Crowd(server.url, Random(1))
    num_fds = api.num_fds()

    async def ask_calmly() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as calm_client:
            await asyncio.gather(*(calm.stay(calm_client, ask) for ask in asks))

    num_tokens = [_num_generated(server)]
    asyncio.run(ask_calmly())
    wait_until(server.is_idle, "the calm ones are done")
    num_tokens.append(_num_generated(server))
    calm_texts = {(ask.model, ask.prompt): text for ask, text in calm.stayed}
    num_right = sum(text == ask.answer for ask, text in calm.stayed)
    assert num_right >= 0.95 * NUM_STREAMS

    num_connections, num_aborted = len(api.net_connections("tcp")), server.num_finished("abort")
    asyncio.run(crowd.storm(asks))

    assert len(crowd.stayed) == round(NUM_STREAMS * (1 - LEAVING_SHARE))
    wrong = [(ask, text) for ask, text in crowd.stayed if text not in (ask.answer, calm_texts[ask.model, ask.prompt])]
    assert wrong == []
    assert crowd.num_aborted > 0
    wait_until(server.is_idle, "whoever left holds no sequence and no block")
    assert server.num_finished("abort") >= num_aborted + crowd.num_aborted
    num_tokens.append(_num_generated(server))
    num_calm, num_in_storm = num_tokens[1] - num_tokens[0], num_tokens[2] - num_tokens[1]
    assert num_in_storm < num_calm + crowd.num_endless * TOKENS_UNTIL_NOTICED
    # TCP only: connections to the private Valkey are Unix sockets, some of which a pool keeps.
    wait_until(
        lambda: len(api.net_connections("tcp")) <= num_connections + SPARE_CONNECTIONS, "their connections are closed"
    )
    wait_until(lambda: api.num_fds() <= num_fds + POOLED_CONNECTIONS, "their files are closed, too")
    _assert_no_adapter_is_referenced(server, http)
    for model, prompt, answer in questions(1):
        chat = client.chat.completions.create(model=model, messages=user(prompt), temperature=0, max_tokens=60)  # pyright: ignore
        assert chat.choices[0].message.content == answer
    assert "Traceback" not in server.text


def _num_generated(server: ServerProcess) -> float:
    """Tokens generated by the engine, whether or not a client read them."""
    return server.metrics()["vllm:generation_tokens_total"]


def _assert_no_adapter_is_referenced(server: ServerProcess, http: httpx.Client) -> None:
    """An unload is answered, and the adapter's memory freed, only once its last reference is gone."""
    try:
        for adapter in ADAPTERS:
            response = http.post("/v1/unload_lora_adapter", json={"lora_name": adapter})
            assert response.status_code == 200, response.text
        metrics = server.metrics()
        assert (metrics["loraserve_adapters_resident"], metrics["loraserve_arena_used_bytes"]) == (0, 0)
    finally:
        for adapter in ADAPTERS:
            http.post(
                "/v1/load_lora_adapter", json={"lora_name": adapter, "lora_path": str(ADAPTER_DIR / adapter)}
            ).raise_for_status()
