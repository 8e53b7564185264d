"""The text printed once the server answers: its address, its models, and up to three commands to copy."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from loraserve.engine.model_description import ModelDescription

MAX_ADAPTERS_SHOWN = 8
DEFAULT_URL = "http://127.0.0.1:8000"
"""Default address of the commands that call a server."""
DEMO_CHAT_PROMPT = "<|user|>{}<|end|><|assistant|>"
"""The demo model's chat template, for its completion example."""


@dataclass(frozen=True, slots=True)
class Banner:
    base_url: str
    uds: Path | None
    needs_key: bool
    open_to: str | None
    """The listening address, if other machines can reach the server."""
    login_token: str | None
    """For one login to the console."""
    model_name: str
    model: ModelDescription
    adapters: list[str]
    particular: frozenset[str]
    """Adapters that cannot answer the examples' prompts with text: activated LoRA, classifiers, and adapters whose chat
    template this server does not have."""
    data_dir: Path
    is_demo: bool
    notes: list[str]
    """Printed after the model's own notes."""

    def __str__(self) -> str:
        where = f"{self.uds} ({self.base_url})" if self.uds else self.base_url
        return "\n".join(
            [
                f"loraserve is ready: {where}",
                f"  base URL  {self.base_url}/v1",
                *([f"  listens   on {self.open_to}: other machines can reach it"] if self.open_to else []),
                *self._console(),
                f"  model     {self.model_name} ({_facts(self.model)})",
                f"  adapters  {shown_names(self.adapters)}",
                f"  data      {self.data_dir}",
                *(f"  note      {note}" for note in [*self.model.notes, *self.notes]),
                "",
                *self._examples(),
            ]
        )

    def _console(self) -> list[str]:
        if self.uds is not None:
            return []
        if self.login_token is not None:
            return [f"  console   {self.base_url}/ui/#/login/{self.login_token} (one login, within 15 minutes)"]
        how = f" (`{self._login_command()}` prints a link)" if self.needs_key else ""
        return [f"  console   {self.base_url}/ui/{how}"]

    def _login_command(self) -> str:
        """The command that logs in to this server, with --url if it is not at the default address."""
        url_option = "" if self.base_url == DEFAULT_URL else f" --url {self.base_url}"
        return f"loraserve ui login{url_option}"

    def _examples(self) -> list[str]:
        if self.model.is_headless:
            return [
                self._curl("/v1/models"),
                self._curl("/v1/embeddings", {"model": self._example_models()[0], "input": "Once upon a time"}),
            ]
        completion_model, chat_model = self._example_models()
        prompt = DEMO_CHAT_PROMPT.format("hello world") if self.is_demo else "Once upon a time"
        completion = {"model": completion_model, "prompt": prompt, "max_tokens": 32}
        question = "hello world" if self.is_demo else "Who are you?"
        chat = {"model": chat_model, "messages": [{"role": "user", "content": question}], "stream": True}
        if self.is_demo:
            completion["temperature"] = chat["temperature"] = 0
        examples = [self._curl("/v1/models"), self._curl("/v1/completions", completion)]
        if self.model.chat_template is not None:
            examples.append(self._curl("/v1/chat/completions", chat))
        return examples

    def _example_models(self) -> tuple[str, str]:
        preferred = [name for name in ("uppercase", "reverse") if self.is_demo and name in self.adapters]
        names = preferred or [name for name in self.adapters if name not in self.particular] or [self.model_name]
        return names[0], names[-1]

    def _curl(self, path: str, body: dict[str, object] | None = None) -> str:
        words = ["curl", "-N"] if body and body.get("stream") else ["curl"]
        if self.uds:
            words += ["--unix-socket", str(self.uds)]
        words.append(self.base_url + path)
        command = shlex.join(words)
        if self.needs_key:
            command += ' -H "Authorization: Bearer $LORASERVE_API_KEY"'
        if body is not None:
            command += f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
        return command


def _facts(model: ModelDescription) -> str:
    differing = [] if model.weights == model.dtype else [f"weights {model.weights}"]
    if model.kv_cache_dtype != model.dtype:
        differing.append(f"KV cache {model.kv_cache_dtype}")
    dtype = f"{model.dtype} ({', '.join(differing)})" if differing else model.dtype
    return f"{model.architecture}, {dtype}, {model.backend} backend, {model.max_model_len} tokens"


def shown_names(names: list[str]) -> str:
    if not names:
        return "none yet"
    shown = ", ".join(names[:MAX_ADAPTERS_SHOWN])
    num_more = len(names) - MAX_ADAPTERS_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown
