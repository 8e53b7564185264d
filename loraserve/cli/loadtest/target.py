"""Inspects the measured server: its kind, which decides the request fields beyond OpenAI's, and its models."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import rich_click as click

from loraserve.cli.async_http_client import fetch
from loraserve.cli.loadtest.server_kind import ServerKind


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""
    parent: str | None = None
    """An adapter's base model."""
    adapter: Any = None
    """loraserve's description of an adapter; other servers have none."""

    @property
    def answers_any_prompt(self) -> bool:
        """Whether it answers with text. Not an activated LoRA, which needs its invocation, nor a classifier."""
        particular = ("invocation", "classifier")
        return not (isinstance(self.adapter, dict) and any(map(self.adapter.get, particular)))


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class LoraxInfo(msgspec.Struct, frozen=True):
    """Fields of LoRAX's /info that distinguish it from other servers with such a route."""

    model_id: str
    max_batch_total_tokens: int
    eager_prefill: bool


@dataclass(frozen=True, slots=True)
class Target:
    kind: ServerKind
    base: str | None = None
    adapters: list[str] = field(default_factory=list)
    """Adapters that it lists, except activated ones, because the test's prompts have no invocation, and classifiers.
    LoRAX lists none: it loads the adapter that a request names."""


async def find_target(client: aiohttp.ClientSession, url: str, wanted: ServerKind | None) -> Target:
    """url: names the server in errors. wanted: None = detect. A server that lists nothing is assumed to accept OpenAI's
    fields only."""
    listed = _model_list(await fetch(client, url, "v1/models"))
    if listed is not None:
        bases = [card for card in listed.data if not card.parent]
        owner = bases[0].owned_by if bases else ""
        known = {"loraserve": ServerKind.LORASERVE, "vllm": ServerKind.VLLM, "sglang": ServerKind.SGLANG}
        kind = wanted or known.get(owner, ServerKind.OPENAI)
        adapters = [card.id for card in listed.data if card.parent and card.answers_any_prompt]
        return Target(kind, bases[0].id if bases else None, adapters)
    info = _lorax_info(await fetch(client, url, "info"))
    if info is not None:
        return Target(wanted or ServerKind.LORAX, info.model_id)
    return Target(wanted or ServerKind.OPENAI)


def wanted_models(target: Target, adapters: str, num_adapters: int | None) -> list[str]:
    """adapters: value of the option: all, base, names, or @ and a file with one name per line."""
    match adapters:
        case "base":
            names = [target.base] if target.base else []
        case "all":
            names = target.adapters or ([target.base] if target.base else [])
        case _ if adapters.startswith("@"):
            names = _names_in(Path(adapters[1:]))
        case _:
            names = [name.strip() for name in adapters.split(",") if name.strip()]
    if not names:
        what = "the server lists no models" if adapters in ("all", "base") else f"--adapters {adapters} has no names"
        raise click.ClickException(f"{what}: name models with --adapters a,b,c or --adapters @FILE")
    if num_adapters is not None and num_adapters > len(names):
        raise click.ClickException(f"--num-adapters {num_adapters}: there are only {len(names)}")
    return names[:num_adapters]


def _names_in(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise click.ClickException(f"--adapters @{path}: {error.strerror}") from error


def _model_list(body: bytes | None) -> ModelList | None:
    try:
        return None if body is None else msgspec.json.decode(body, type=ModelList)
    except msgspec.DecodeError:
        return None


def _lorax_info(body: bytes | None) -> LoraxInfo | None:
    try:
        return None if body is None else msgspec.json.decode(body, type=LoraxInfo)
    except msgspec.DecodeError:
        return None
