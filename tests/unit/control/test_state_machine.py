"""Documents and residency together: in whatever order adapters are declared, used and deleted, names resolve as they
should, the engine has all contents in use, and no unwanted content stays loaded."""

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loraserve.serving.errors import ServingError
from loraserve.store.records import DocumentKind
from tests.support.valkey import Valkey, running_valkey
from tests.unit.control.nodes import ACME, Node, eventually, running_node, with_tenants

NAMES = st.sampled_from(["sql", "math"])
TEXTS = st.sampled_from(["one", "two", "three"])
NUMBERS = st.integers(1, 4)
NODES = st.integers(0, 1)


class Model:
    """The expected state of one adapter."""

    def __init__(self) -> None:
        self.versions: dict[int, str] = {}
        """Digest by number, without deleted ones."""
        self.last = 0
        self.live: int | None = None
        self.previous: int | None = None
        self.deleted = False

    def publish(self, digest: str, *, activate: bool) -> None:
        if self.deleted:
            self.versions, self.live, self.previous, self.deleted = {}, None, None, False
        known = [n for n, found in self.versions.items() if found == digest]
        if not known:
            self.last += 1
            self.versions[self.last] = digest
        if activate or self.live is None:
            self.move(known[0] if known else self.last)

    def move(self, n: int) -> None:
        if self.live is not None and self.live != n:
            self.previous = self.live
        self.live = n


class DocumentsAndResidency(RuleBasedStateMachine):
    """Two servers on one Redis and data directory."""

    server: Valkey

    @initialize()
    def start(self) -> None:
        self.server.command("FLUSHALL")
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.stack = contextlib.AsyncExitStack()
        self.models: dict[str, Model] = {}
        self.held: list[tuple[Node, str, contextlib.AsyncExitStack]] = []
        self.nodes: list[Node] = []

        async def start_nodes() -> None:
            for _ in range(2):
                node = running_node(Path(self.folder.name) / "data", self.server.url, max_loaded=2)
                self.nodes.append(await self.stack.enter_async_context(node))
            await with_tenants(self.nodes[0])

        self.run(start_nodes())

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return

        async def stop() -> None:
            for _, _, held in self.held:
                await held.aclose()
            await self.settle()
            for node in self.nodes:
                live = [set(model.versions.values()) for model in self.models.values() if not model.deleted]
                assert set(node.engine.known) <= set().union(*live)
                assert len(node.engine.known) <= 2
            await self.stack.aclose()

        try:
            self.run(stop())
        finally:
            self.runner.close()
            self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    async def settle(self) -> None:
        """Wait until both servers have heard of everything and no background work is running."""
        newest = {name: self.nodes[0].documents.get(*key) for name, key in self.keys().items()}
        for node in self.nodes:
            await eventually(
                lambda node=node: {name: node.catalog.get(*key) for name, key in self.keys().items()} == newest
            )
            await eventually(lambda node=node: not node.residency._unloading._running)

    def is_deleted(self, name: str) -> bool:
        found = self.nodes[0].documents.get(DocumentKind.ADAPTER, f"acme/{name}")
        return found is not None and found.deleted

    def known_to(self, node: Node) -> dict[str, Any]:
        return {name: node.catalog.get(*key) for name, key in self.keys().items()}

    def keys(self) -> dict[str, Any]:
        return {name: (DocumentKind.ADAPTER, f"acme/{name}") for name in self.models}

    @rule(at=NODES, name=NAMES, text=TEXTS, activate=st.booleans())
    def publish(self, at: int, name: str, text: str, activate: bool) -> None:
        async def work() -> None:
            digest = await self.nodes[at].publish(name, text, activate=activate)
            self.models.setdefault(name, Model()).publish(digest, activate=activate)

        self.run(work())

    @rule(at=NODES, name=NAMES, n=NUMBERS)
    def move_alias(self, at: int, name: str, n: int) -> None:
        model = self.models.get(name)
        is_possible = model is not None and not model.deleted and n in model.versions

        async def work() -> None:
            with contextlib.nullcontext() if is_possible else pytest.raises(ServingError):
                await self.nodes[at].aliases.put(ACME, "r", name, "live", n)
            if is_possible and model is not None:
                model.move(n)

        self.run(work())

    @rule(at=NODES, name=NAMES)
    def roll_back(self, at: int, name: str) -> None:
        model = self.models.get(name)
        is_possible = model is not None and not model.deleted and model.previous is not None

        async def work() -> None:
            with contextlib.nullcontext() if is_possible else pytest.raises(ServingError):
                await self.nodes[at].aliases.rollback(ACME, "r", name)
            if is_possible and model is not None:
                model.live, model.previous = model.previous, model.live

        self.run(work())

    @rule(at=NODES, name=NAMES, n=NUMBERS)
    def delete_version(self, at: int, name: str, n: int) -> None:
        model = self.models.get(name)
        is_possible = model is not None and not model.deleted and n in model.versions and n != model.live

        async def work() -> None:
            with contextlib.nullcontext() if is_possible else pytest.raises(ServingError):
                await self.nodes[at].versions.delete(ACME, "r", name, n)
            if is_possible and model is not None:
                del model.versions[n]
                model.previous = None if model.previous == n else model.previous

        self.run(work())

    @rule(at=NODES, name=NAMES)
    def delete(self, at: int, name: str) -> None:
        model = self.models.get(name)
        is_possible = model is not None and not model.deleted
        is_held = any(digest in model.versions.values() for _, digest, _ in self.held) if model is not None else False

        async def work() -> None:
            with contextlib.nullcontext() if is_possible else pytest.raises(ServingError):
                deletion = self.nodes[at].adapters.delete(ACME, "r", name, drain_s=0)
                if is_held and is_possible:
                    # It would wait for the holders of the content.
                    task = asyncio.create_task(deletion)
                    await eventually(lambda: self.is_deleted(name))
                    task.cancel()
                else:
                    await deletion
            if is_possible and model is not None:
                model.deleted = True

        self.run(work())

    @rule(at=NODES, name=NAMES)
    def restore(self, at: int, name: str) -> None:
        model = self.models.get(name)

        async def work() -> None:
            with contextlib.nullcontext() if model is not None else pytest.raises(ServingError):
                await self.nodes[at].adapters.restore(ACME, "r", name)
            if model is not None:
                model.deleted = False

        self.run(work())

    @rule(at=NODES, name=NAMES)
    def begin_request(self, at: int, name: str) -> None:
        """Admission makes up for changes that this server has not heard of yet."""
        model, node = self.models.get(name), self.nodes[at]
        is_there = model is not None and not model.deleted

        async def work() -> None:
            with contextlib.nullcontext() if is_there else pytest.raises(ServingError):
                admitted = await node.admit(ACME, name)
                adapter = admitted.target.adapter
                assert adapter is not None
                assert model is not None
                assert model.live is not None
                assert (adapter.version, adapter.digest) == (model.live, model.versions[model.live])
                held = contextlib.AsyncExitStack()
                await held.enter_async_context(node.residency.hold(adapter.digest))
                self.held.append((node, adapter.digest, held))
                node.running.remove(admitted.request_id)

        self.run(work())

    @rule(index=st.integers(0, 7))
    def end_request(self, index: int) -> None:
        if self.held:
            _, _, held = self.held.pop(index % len(self.held))
            self.run(held.aclose())

    @rule()
    def empty_redis(self) -> None:
        self.server.command("FLUSHALL")

    @invariant()
    def the_engine_has_what_is_used(self) -> None:
        for node, digest, _ in getattr(self, "held", []):
            assert digest in node.engine.known

    @invariant()
    def what_may_be_unloaded_for_others_is_loaded_and_not_used(self) -> None:
        for node in getattr(self, "nodes", []):
            entries = node.residency._entries.items()
            unused = {digest for digest, entry in entries if entry.is_loaded and entry.num_references == 0}
            assert node.residency._idle.keys() == unused

    @rule()
    def all_servers_agree_in_the_end(self) -> None:
        async def work() -> None:
            await self.settle()
            for name, model in self.models.items():
                for node in self.nodes:
                    document = node.catalog.adapter("acme", name)
                    assert document is not None
                    assert document.deleted == model.deleted
                    found = {version.n: version.digest for version in document.doc.versions if not version.deleted_at}
                    assert found == model.versions
                    live = document.doc.aliases.get("live")
                    assert live is not None
                    assert (live.version, live.previous) == (model.live, model.previous)

        self.run(work())


@pytest.mark.slow
def test_documents_and_residency_stay_consistent_in_any_order_of_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    with running_valkey(tmp_path) as server:
        machine = type("OnThisServer", (DocumentsAndResidency,), {"server": server})
        test_case = machine.TestCase
        test_case.settings = settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[*HealthCheck]
        )
        test_case().runTest()
