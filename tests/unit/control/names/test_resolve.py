from pathlib import Path

import pytest

from loraserve.control.adapters.service import AdapterPatch
from loraserve.control.documents.adapter_edits import CanaryShare
from loraserve.control.names.resolve import in_canary
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Canary, Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, run, running_node, with_tenants

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
SHARED = server_principal("shared", "config")


async def version_of(node: Node, model: str, principal: Principal = ACME, user: str | None = None) -> tuple[str, int]:
    target = await node.resolver.resolve(principal, model, user=user)
    assert target.name == model
    assert target.adapter is not None
    return target.adapter.tenant, target.adapter.version


async def refusal(node: Node, model: str | None, principal: Principal = ACME) -> ServingError:
    with pytest.raises(ServingError) as refused:
        await node.resolver.resolve(principal, model)
    return refused.value


def test_names_versions_and_aliases_are_resolved(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.publish("sql", "two", activate=False)
            await node.aliases.put(ACME, "r", "sql", "next", 2)
            assert await version_of(node, "sql") == ("acme", 1)
            assert await version_of(node, "sql@live") == ("acme", 1)
            assert await version_of(node, "sql@v2") == ("acme", 2)
            assert await version_of(node, "sql@next") == ("acme", 2)
            assert await version_of(node, "tiny:sql@next") == ("acme", 2)
            assert (await node.resolver.resolve(ACME, "tiny")).adapter is None
            assert (await refusal(node, None)).code is ErrorCode.MISSING_PARAMETER
            assert (await refusal(node, "")).code is ErrorCode.MISSING_PARAMETER

    run(scenario)


def test_foreign_missing_deleted_and_unlisted_names_get_the_same_answer(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for name in ("foreign", "unlisted", "gone"):
                await node.publish(name, name, GLOBEX if name == "foreign" else ACME)
            await node.adapters.delete(ACME, "r", "gone", drain_s=0)
            listed = Principal("k", Role.INFER, "acme", "acme", adapters=frozenset({"sql", "foreign", "gone"}))
            messages: set[str] = set()
            for name in ("foreign", "unlisted", "gone", "missing", "unlisted@v1", "gone@v1", "a b", "x" * 99):
                error = await refusal(node, name, listed)
                assert (error.code, error.param) == (ErrorCode.MODEL_NOT_FOUND, "model")
                messages.add(error.message.replace(name, "<name>"))
            assert len(messages) == 1
            assert (await refusal(node, "unlisted@v9")).code is ErrorCode.MODEL_NOT_FOUND
            assert (await refusal(node, "unlisted@nope")).code is ErrorCode.MODEL_NOT_FOUND

    run(scenario)


def test_every_tenant_sees_a_shared_adapter_unless_it_has_its_own(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "shared", SHARED)
            await node.publish("sql", "own", GLOBEX)
            assert await version_of(node, "sql") == ("shared", 1)
            assert await version_of(node, "sql", GLOBEX) == ("globex", 1)
            assert [found.id for found in node.resolver.visible(ACME)] == ["shared/sql"]
            assert [found.id for found in node.resolver.visible(GLOBEX)] == ["globex/sql"]
            await node.adapters.delete(GLOBEX, "r", "sql", drain_s=0)
            assert await version_of(node, "sql", GLOBEX) == ("shared", 1)

    run(scenario)


def test_a_disabled_adapter_is_forbidden_to_its_tenant_and_not_found_by_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "own")
            await node.adapters.patch(ACME, "r", "sql", AdapterPatch(enabled=False))
            assert (await refusal(node, "sql")).code is ErrorCode.FORBIDDEN
            assert (await refusal(node, "sql", GLOBEX)).code is ErrorCode.MODEL_NOT_FOUND
            assert node.resolver.visible(ACME) == []
            await node.adapters.patch(ACME, "r", "sql", AdapterPatch(enabled=True))
            assert await version_of(node, "sql") == ("acme", 1)

    run(scenario)


def test_the_adapters_in_the_url_and_in_the_body_must_agree(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.publish("math", "two")
            for nothing in (None, ""):  # OpenAI's clients cannot leave it out.
                target = await node.resolver.resolve(ACME, nothing, path_adapter="sql")
                assert (target.name, target.adapter is not None) == ("sql", True)
                assert (await node.resolver.resolve_again(ACME, target)).adapter == target.adapter
            target = await node.resolver.resolve(ACME, "sql@v1", path_adapter="sql")
            assert target.name == "sql@v1"
            await node.publish("sql", "three")
            target = await node.resolver.resolve(ACME, "sql@v1", path_adapter="sql")
            assert target.adapter is not None
            assert target.adapter.version == 1
            with pytest.raises(ServingError):
                await node.resolver.resolve(ACME, "sql@v1", path_adapter="sql@v2")
            for model in ("math", "tiny"):
                with pytest.raises(ServingError) as refused:
                    await node.resolver.resolve(ACME, model, path_adapter="sql")
                assert refused.value.code is ErrorCode.INVALID_VALUE
            for path_adapter in ("tiny", "missing"):
                with pytest.raises(ServingError) as refused:
                    await node.resolver.resolve(ACME, None, path_adapter=path_adapter)
                assert refused.value.code is ErrorCode.MODEL_NOT_FOUND

    run(scenario)


def test_an_adapter_published_on_another_server_is_found_here_at_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with (
            running_node(data_dir, valkey.url) as one,
            running_node(data_dir, valkey.url, follow=False) as deaf,
        ):
            await with_tenants(one)
            await deaf.catalog.catch_up()
            await one.publish("sql", "one")
            assert await version_of(deaf, "sql") == ("acme", 1)
            await one.publish("sql", "two")
            assert await version_of(deaf, "sql@v2") == ("acme", 2)

    run(scenario)


def test_the_newest_of_an_adapter_is_resolved_by_a_server_that_has_not_heard_of_it(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            await one.publish("sql", "one")
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                await one.publish("sql", "two")
                assert await version_of(deaf, "sql") == ("acme", 1)
                target = await deaf.resolver.resolve_newest(ACME, None, path_adapter="sql")
                assert target.adapter is not None
                assert target.adapter.version == 2
                await one.aliases.rollback(ACME, "r", "sql")
                target = await deaf.resolver.resolve_newest(ACME, "sql")
                assert target.adapter is not None
                assert target.adapter.version == 1
                await one.adapters.delete(ACME, "r", "sql", drain_s=0)
                with pytest.raises(ServingError) as refused:
                    await deaf.resolver.resolve_newest(ACME, "sql")
                assert refused.value.code is ErrorCode.MODEL_NOT_FOUND

    run(scenario)


def test_a_canary_keeps_its_users_while_its_weight_grows(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.publish("sql", "two", activate=False)
            users = [f"user-{number}" for number in range(400)]
            inside: set[str] = set()
            for weight_bp in (0, 1000, 5000, 10_000):
                await node.aliases.put(ACME, "r", "sql", "live", 1, canary=CanaryShare(2, weight_bp))
                now = {user for user in users if await version_of(node, "sql", user=user) == ("acme", 2)}
                assert inside <= now
                assert abs(len(now) - 400 * weight_bp / 10_000) < 60
                inside = now
                # A version given by number bypasses the canary.
                assert await version_of(node, "sql@v1", user=users[0]) == ("acme", 1)
            await node.aliases.put(ACME, "r", "sql", "live", 1, canary=CanaryShare(2, 5000))
            # Without a user each request is drawn, so a backend that names none is not all in or all out.
            drawn = {(await version_of(node, "sql"))[1] for _ in range(64)}
            assert drawn == {1, 2}

    run(scenario)


def test_canary_membership_depends_on_tenant_name_salt_and_user() -> None:
    def members(tenant: str, name: str, salt: str) -> list[int]:
        canary = Canary(version=2, weight_bp=5000, salt=salt)
        return [user for user in range(200) if in_canary(tenant, name, canary, str(user))]

    one = members("acme", "sql", "a")
    assert one == members("acme", "sql", "a")
    others = [members("acme", "sql", "b"), members("globex", "sql", "a"), members("acme", "math", "a")]
    # The parts are not merely concatenated.
    others.append(members("acmes", "ql", "a"))
    assert one not in others
