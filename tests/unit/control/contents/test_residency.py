import asyncio
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from loraserve_adapters.packed_file import packed_file_name

from loraserve.control.documents.adapter_edits import mark_deleted
from loraserve.control.ingest.processes import DamagedFilesError, IngestError
from loraserve.engine.request import EngineStats
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, eventually, run, running_node, with_tenants

__all__ = ["valkey"]


def test_content_is_packed_and_loaded_only_at_its_first_use(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            assert node.residency.of(digest).tier is Tier.DISK

            async def use() -> float:
                async with node.residency.hold(digest) as load_ms:
                    assert digest in node.engine.known
                    await asyncio.sleep(0)
                    return load_ms

            waits = await asyncio.gather(*(use() for _ in range(5)))
            assert (node.packer.packed, node.engine.loads) == ([digest], [digest])
            assert waits[0] > 0
            assert await use() == 0.0
            state = node.residency.of(digest)
            assert (state.tier, state.num_hits, state.num_references) == (Tier.HOST, 6, 0)
            assert state.last_used_at == node.clock.now
            assert state.load_ms is not None
            node.engine.stats = EngineStats(resident_adapters=[digest])
            assert node.residency.of(digest).tier is Tier.DEVICE
            assert node.residency.not_forgotten() == [digest]

    run(scenario)


def test_a_tenant_sees_only_its_own_use_of_a_content(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            async with node.residency.hold(digest, tenant="acme"):
                pass
            own, other = (node.residency.seen_by(tenant, digest) for tenant in ("acme", "other"))
            assert (own.tier, own.num_hits, own.last_used_at) == (Tier.HOST, 1, node.clock.now)
            assert (other.tier, other.num_hits, other.last_used_at, other.load_ms) == (Tier.DISK, 0, None, None)
            async with node.residency.hold(digest, tenant="other"), node.residency.hold(digest, tenant="other"):
                pass
            assert [node.residency.seen_by(tenant, digest).num_hits for tenant in ("acme", "other")] == [1, 2]

    run(scenario)


def test_an_existing_packed_file_is_reused_and_a_damaged_one_rebuilt(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            await node.residency.load(digest)
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await node.residency.load(digest)
            assert node.packer.packed == []
        (data_dir / "packed" / packed_file_name(digest, node.engine.model.layout)).write_bytes(b"damaged")
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await node.residency.load(digest)
            assert (node.packer.packed, set(node.engine.known)) == ([digest], {digest})

    run(scenario)


def test_a_packed_file_that_the_engine_cannot_read_is_rebuilt_for_the_next_use(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            async with node.residency.hold(digest):
                node.residency.mark_damaged(digest)
            packed = [*node.packer.packed]
            for _ in range(2):
                async with node.residency.hold(digest):
                    assert digest in node.engine.known
            assert node.packer.packed == [*packed, digest]
            node.residency.mark_damaged("of nobody")

    run(scenario)


def test_content_is_unloaded_with_the_last_document_that_wants_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("a", "same")
            assert await node.publish("b", "same") == digest
            await node.residency.load(digest)
            await node.adapters.delete(ACME, "r", "a", drain_s=0)
            assert digest in node.engine.known
            async with node.residency.hold(digest):
                deletion = asyncio.create_task(node.adapters.delete(ACME, "r", "b", drain_s=0))
                await eventually(lambda: not node.residency.is_wanted(digest))
                await asyncio.sleep(0.01)
                assert digest in node.engine.known
            assert (await deletion).drained
            assert digest not in node.engine.known

    run(scenario)


def test_content_without_a_document_can_be_used_and_is_unloaded_afterwards(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            digest = node.put_blob("upload")
            async with node.residency.hold(digest):
                assert digest in node.engine.known
            await eventually(lambda: node.engine.known == {})

    run(scenario)


def test_content_wanted_again_during_its_unload_is_loaded_again_afterwards(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            await node.residency.load(digest)
            node.engine.may_unload.clear()
            deletion = asyncio.create_task(node.adapters.delete(ACME, "r", "sql", drain_s=0))
            await eventually(lambda: not node.residency.is_loaded(digest))
            await node.adapters.restore(ACME, "r", "sql")
            load = asyncio.create_task(node.residency.load(digest))
            await asyncio.sleep(0.01)
            assert not load.done()
            node.engine.may_unload.set()
            await load
            assert (node.engine.loads, node.engine.unloads) == ([digest, digest], [digest])
            assert digest in node.engine.known
            await deletion

    run(scenario)


def test_the_least_recently_used_content_is_unloaded_above_max_loaded(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_loaded=2) as node:
            await with_tenants(node)
            digests = [await node.publish(f"a{number}", str(number)) for number in range(4)]
            async with node.residency.hold(digests[0]):
                for digest in digests[1:]:
                    node.clock.now += 1
                    await node.residency.load(digest)
                await eventually(lambda: len(node.engine.known) == 2)
                assert set(node.engine.known) == {digests[0], digests[3]}
            async with node.residency.hold(digests[1]):
                assert digests[1] in node.engine.known

    run(scenario)


def test_a_request_above_max_loaded_does_not_look_through_all_contents(valkey: Valkey, tmp_path: Path) -> None:
    class NeverListed(dict[str, Any]):
        def items(self) -> NoReturn:
            raise AssertionError("all contents were looked at")

        __iter__ = keys = values = items

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_loaded=2) as node:
            await with_tenants(node)
            digests = [await node.publish(f"a{number}", str(number)) for number in range(4)]
            node.residency._entries = NeverListed(node.residency._entries)
            for _ in range(2):
                for digest in digests:
                    async with node.residency.hold(digest):
                        pass
            await eventually(lambda: set(node.engine.known) == set(digests[2:]))
            assert node.engine.unloads == [*digests, *digests[:2]]

    run(scenario)


def test_a_content_was_last_used_when_its_last_request_ended(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_loaded=2) as node:
            await with_tenants(node)
            long, short, other = [await node.publish(name, name) for name in ("long", "short", "other")]
            async with node.residency.hold(long):
                node.clock.now += 1
                async with node.residency.hold(short):
                    node.clock.now += 1
            await node.residency.load(other)
            await eventually(lambda: set(node.engine.known) == {long, other})

    run(scenario)


def test_an_idle_content_is_unloaded_for_others_only_while_it_is_not_pinned(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_loaded=1) as node:
            await with_tenants(node)
            first, second, third = [await node.publish(name, name) for name in ("first", "second", "third")]
            await node.residency.load(first)
            node.residency.pin(frozenset({first, third}))
            await node.residency.load(second)
            await eventually(lambda: set(node.engine.known) == {first})
            async with node.residency.hold(first):
                node.residency.pin(frozenset({third}))
            await node.residency.load(third)
            await eventually(lambda: set(node.engine.known) == {third})
            node.residency.pin(frozenset())
            await node.residency.load(second)
            await eventually(lambda: set(node.engine.known) == {second})

    run(scenario)


def test_load_failures_are_reported_and_not_permanent(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            for error in (IngestError("the process was killed"), OSError(28, "No space left on device")):
                node.packer.error = error
                with pytest.raises(ServingError) as refused:
                    await node.residency.load(digest)
                assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.SERVICE_UNAVAILABLE, 5)
                assert str(tmp_path) not in refused.value.message
            node.packer.error = DamagedFilesError(digest, "their digest is another")
            with pytest.raises(ServingError) as refused:
                await node.residency.load(digest)
            assert refused.value.code is ErrorCode.ADAPTER_UNREADABLE
            node.packer.error = None
            node.engine.refuse_load = "it is too large"
            with pytest.raises(ServingError) as refused:
                async with node.residency.hold(digest):
                    pass
            assert refused.value.code is ErrorCode.ADAPTER_INVALID
            node.engine.refuse_load = None
            await node.residency.load(digest)
            with pytest.raises(ServingError) as refused:
                await node.residency.load("0" * 64)
            assert refused.value.code is ErrorCode.ADAPTER_UNREADABLE
            assert node.residency.of(digest).num_references == 0

    run(scenario)


def test_content_in_use_before_its_unload_begins_stays_loaded(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            await node.residency.load(digest)
            known = await node.adapters.read(ACME, "sql")
            # The unload is decided but has not begun when the request arrives.
            gone = msgspec.structs.replace(
                known, rev=2, deleted=True, doc=mark_deleted(known.doc, now=1, drain_until=1)
            )
            assert node.catalog.apply(gone)
            async with node.residency.hold(digest) as load_ms:
                assert load_ms == 0.0
                await asyncio.sleep(0.01)
                assert digest in node.engine.known
            await eventually(lambda: digest not in node.engine.known)

    run(scenario)
