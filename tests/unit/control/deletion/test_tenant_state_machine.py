"""A tenant is deleted, restored, used and erased in any order, on two servers whose Redis is emptied now and then: it
is there with everything it had, or nothing of it is left."""

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from loraserve.control.deletion.erasure import PROPAGATED_AFTER_S
from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, DocumentKind, Role, TenantDoc
from tests.support.valkey import Valkey, running_valkey
from tests.unit.control.deletion.test_erasure import GLOBEX
from tests.unit.control.nodes import ACME, ADMIN, Node, eventually, running_node, with_tenants

NODES = st.integers(0, 1)


class TenantLife(RuleBasedStateMachine):
    server: Valkey

    @initialize()
    def start(self) -> None:
        self.server.command("FLUSHALL")
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.stack = contextlib.AsyncExitStack()
        self.nodes: list[Node] = []
        self.deleted_at: float | None = None

        async def start_nodes() -> None:
            for _ in range(2):
                node = running_node(Path(self.folder.name) / "data", self.server.url)
                self.nodes.append(await self.stack.enter_async_context(node))
            one = await with_tenants(self.nodes[0])
            await one.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            self.key = (await one.keys.create(ACME, "r", role=Role.INFER)).text
            self.own = await one.publish("sql", "its own")
            self.common = await one.publish("both", "in common")
            await one.publish("copy", "in common", GLOBEX)
            for node in self.nodes:
                await eventually(lambda node=node: len(node.catalog.all_adapters()) == 3)

        self.run(start_nodes())

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            self.run(self.stack.aclose())
        finally:
            self.runner.close()
            self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        self.runner.run(work)

    @property
    def now(self) -> float:
        return self.nodes[0].clock.now

    @property
    def is_over(self) -> bool:
        return self.deleted_at is not None and self.now >= self.deleted_at + RESTORABLE_S

    @rule(at=NODES)
    def delete(self, at: int) -> None:
        self.run(self.nodes[at].tenant_deletion.delete(ADMIN, "r", "acme"))
        if self.deleted_at is None:
            self.deleted_at = self.now

    @rule(at=NODES)
    def restore(self, at: int) -> None:
        is_over = self.is_over

        async def work() -> None:
            with pytest.raises(ServingError) if is_over else contextlib.nullcontext():
                await self.nodes[at].tenant_deletion.restore(ADMIN, "r", "acme")

        self.run(work())
        if not is_over:
            self.deleted_at = None

    @rule(at=NODES, name=st.sampled_from(["sql", "both"]))
    def use(self, at: int, name: str) -> None:
        """The server may not have heard of the newest change yet."""
        node = self.nodes[at]

        async def work() -> None:
            with contextlib.nullcontext() if self.deleted_at is None else pytest.raises(ServingError) as refused:
                admitted = await node.admit(await node.authenticator.authenticate(self.key), name)
                assert admitted.target.adapter is not None
                await node.residency.load(admitted.target.adapter.digest)
                node.running.remove(admitted.request_id)
            if refused is not None:
                assert refused.value.code in (ErrorCode.INVALID_API_KEY, ErrorCode.NOT_FOUND, ErrorCode.MODEL_NOT_FOUND)

        self.run(work())

    @rule(hours=st.sampled_from([0.5, 12.0]))
    def time_passes(self, hours: float) -> None:
        for node in self.nodes:
            node.clock.now += hours * 3600

    @rule(at=NODES)
    def sweep(self, at: int) -> None:
        self.run(self.nodes[at].erasure.sweep())

    @rule()
    def empty_redis(self) -> None:
        self.server.command("FLUSHALL")

    @rule()
    def all_servers_agree_in_the_end(self) -> None:
        async def work() -> None:
            newest = self.nodes[0].documents.get(DocumentKind.TENANT, "acme")
            for node in self.nodes:
                await eventually(lambda node=node: node.catalog.known_tenant("acme") == newest)
                await eventually(lambda node=node: not node.residency._unloading._running)
                is_there = self.deleted_at is None
                assert (node.catalog.tenant("acme") is not None) == is_there
                assert {adapter.doc.name for adapter in node.catalog.adapters("acme")} == (
                    {"sql", "both"} if is_there else set()
                )
                assert node.residency.is_wanted(self.own) == is_there
                assert is_there or self.own not in node.engine.known
                assert node.residency.is_wanted(self.common)
                assert node.blobs.folder(self.own) is not None or self.is_over
                assert node.blobs.folder(self.common) is not None

        self.run(work())

    @rule()
    def it_is_erased_once_it_is_over(self) -> None:
        if not self.is_over:
            return

        async def work() -> None:
            for _ in range(2):
                for node in self.nodes:
                    await eventually(lambda node=node: node.catalog.ready)
                    await node.erasure.sweep()
                    node.clock.now += PROPAGATED_AFTER_S
            node = self.nodes[0]
            found = node.documents.get(DocumentKind.TENANT, "acme")
            assert found is not None
            assert isinstance(found.doc, TenantDoc)
            assert found.doc.erased_at is not None
            ids = [document.id for kind in DocumentKind for document in node.documents.scan(kind)]
            assert [name for name in ids if name.startswith("acme")] == ["acme"]

        self.run(work())


@pytest.mark.slow
def test_a_tenant_is_either_complete_or_gone_throughout_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    with running_valkey(tmp_path) as server:
        machine = type("OnThisServer", (TenantLife,), {"server": server})
        test_case = machine.TestCase
        test_case.settings = settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[*HealthCheck]
        )
        test_case().runTest()
