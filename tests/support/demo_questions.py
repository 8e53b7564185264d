"""Questions to the demo model with known right answers, which differ between adapters."""

import json
from pathlib import Path
from typing import Any

import loraserve.demo
from loraserve.demo.skills import SKILLS, held_out

BASE = "loraserve-demo"
ADAPTERS = sorted(SKILLS)
ADAPTER_DIR = Path(loraserve.demo.__file__).parent / "adapters"
MAX_BASE_TOKENS = 60


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def templated(content: str) -> str:
    """One user message as the chat template renders it."""
    return f"<|user|>{content}<|end|><|assistant|>"


def questions(count: int) -> list[tuple[str, str, str]]:
    """(model, prompt, answer): `count` for each adapter, interleaved, then three for the base."""
    pairs = {name: held_out(name, count) for name in ADAPTERS}
    asked = [(name, *pairs[name][index]) for index in range(count) for name in ADAPTERS]
    # The base model echoes a prompt that has no instruction.
    echoes = [(BASE, prompt, f"You said: {prompt}") for prompt in ("hello world", "good morning", "red apple")]
    return asked + echoes


def events_of(body: str) -> list[dict[str, Any]]:
    """The data of a complete SSE body; fails unless it ends with its only [DONE]."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]", body[-300:]
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def content_of(events: list[dict[str, Any]]) -> str:
    """The text of a chat stream's first choice."""
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
