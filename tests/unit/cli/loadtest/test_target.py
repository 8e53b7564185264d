import asyncio
from pathlib import Path

import pytest
import rich_click as click
from aiohttp import web

from loraserve.cli.loadtest.server_kind import ServerKind
from loraserve.cli.loadtest.target import Target, find_target, wanted_models
from tests.support.loopback import client_of

LORAX_INFO = {"model_id": "mistral", "max_batch_total_tokens": 32000, "eager_prefill": False, "version": "0.1"}
TGI_INFO = {"model_id": "mistral", "max_batch_total_tokens": 32000, "version": "3.0"}


def target_of(routes: dict[str, object], wanted: ServerKind | None = None, status: int = 404) -> Target:
    async def find() -> Target:
        async def answer(request: web.Request) -> web.Response:
            found = routes.get(request.path)
            return web.Response(status=status) if found is None else web.json_response(found)

        async with client_of(answer) as client:
            return await find_target(client, "http://server", wanted)

    return asyncio.run(find())


def cards(owner: str) -> dict[str, object]:
    base = {"id": "base", "object": "model", "owned_by": owner, "parent": None}
    return {"data": [base, {"id": "sql", "owned_by": owner, "parent": "base"}], "object": "list"}


@pytest.mark.parametrize("kind", [ServerKind.LORASERVE, ServerKind.VLLM, ServerKind.SGLANG])
def test_a_server_is_recognized_by_the_owner_of_its_models(kind: ServerKind) -> None:
    assert target_of({"/v1/models": cards(kind.value)}) == Target(kind, "base", ["sql"])


def test_adapters_that_need_an_invocation_in_their_prompts_are_left_out() -> None:
    adapters = {"plain": {"rank": 8}, "judge": {"rank": 8, "invocation": {"token_ids": [5]}}, "other": "text"}
    listed = [{"id": name, "parent": "base", "adapter": adapter} for name, adapter in adapters.items()]
    found = target_of({"/v1/models": {"data": [{"id": "base", "owned_by": "loraserve"}, *listed]}})
    assert found.adapters == ["plain", "other"]


def test_a_server_with_an_unknown_owner_is_treated_as_openai_unless_a_kind_is_given() -> None:
    assert target_of({"/v1/models": cards("someone")}).kind is ServerKind.OPENAI
    assert target_of({"/v1/models": cards("someone")}, ServerKind.VLLM).kind is ServerKind.VLLM


def test_lorax_is_recognized_by_its_info_and_not_confused_with_tgi() -> None:
    assert target_of({"/info": LORAX_INFO}) == Target(ServerKind.LORAX, "mistral", [])
    assert target_of({"/info": TGI_INFO}) == Target(ServerKind.OPENAI)


def test_a_wrong_key_is_reported() -> None:
    with pytest.raises(click.ClickException, match="http://server answers /v1/models with 401 Unauthorized"):
        target_of({}, status=401)


def test_a_redirect_is_reported() -> None:
    with pytest.raises(click.ClickException, match="307"):
        target_of({}, status=307)


def test_a_server_that_hangs_up_is_reported() -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def find() -> Target:
        async with client_of(hang_up) as client:
            return await find_target(client, "http://server", None)

    with pytest.raises(click.ClickException, match="http://server does not answer /v1/models: ServerDisconnectedError"):
        asyncio.run(find())


LISTED = Target(ServerKind.VLLM, "base", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("target", "adapters", "num_adapters", "models"),
    [
        (LISTED, "all", None, ["a", "b", "c"]),
        (LISTED, "all", 2, ["a", "b"]),
        (LISTED, "base", None, ["base"]),
        (LISTED, "b, x", None, ["b", "x"]),
        (Target(ServerKind.OPENAI, "gpt"), "all", None, ["gpt"]),
    ],
)
def test_models_are_selected_by_name_or_number(
    target: Target, adapters: str, num_adapters: int | None, models: list[str]
) -> None:
    assert wanted_models(target, adapters, num_adapters) == models


def test_models_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names"
    file.write_text("a\n\n b \n")
    assert wanted_models(Target(ServerKind.LORAX), f"@{file}", None) == ["a", "b"]
    with pytest.raises(click.ClickException, match="No such file"):
        wanted_models(Target(ServerKind.LORAX), f"@{tmp_path / 'none'}", None)


def test_missing_or_too_few_models_are_refused_with_a_remedy() -> None:
    with pytest.raises(click.ClickException, match="--adapters a,b,c"):
        wanted_models(Target(ServerKind.OPENAI), "all", None)
    with pytest.raises(click.ClickException, match=r"^--adapters , has no names: name models with"):
        wanted_models(LISTED, ",", None)
    with pytest.raises(click.ClickException, match="--num-adapters 4: there are only 3"):
        wanted_models(LISTED, "all", 4)
