"""The app behind a real uvicorn on a free port, in a thread: real bytes, real disconnects."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from loraserve_adapters.packed_file import packed_file_name
from loraserve_adapters.rules import AdapterRules

from loraserve.api.app import create_app
from loraserve.api.app_context import AppContext
from loraserve.control.control_plane import ControlPlane, build_control
from loraserve.control.declared import ControlSettings, open_declared
from loraserve.control.documents.adapter_edits import Content
from loraserve.control.names.labels import CatalogNames
from loraserve.control.tenancy.principal import server_principal
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.settings import ServingSettings
from loraserve.store.records import SHARED_TENANT, ClassifierRecord, Document, TenantDoc
from tests.support.fake_engine_client import FakeEngine
from tests.support.valkey import Valkey, running_valkey

REDIS_TIMEOUT_S = 5.0
"""Longer than a server's, because a busy machine is not an outage."""

WAIT_S = 30.0
"""Limit for work that takes milliseconds, on a machine that may be busy."""

T = TypeVar("T")


@dataclass(slots=True)
class LiveServer:
    url: str
    engine: FakeEngine
    context: AppContext
    loop: asyncio.AbstractEventLoop
    valkey: Valkey

    @property
    def runtime(self) -> Runtime:
        return self.context.runtime

    @property
    def control(self) -> ControlPlane:
        return self.context.control

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=2 * WAIT_S)

    def call(self, work: Callable[[], T]) -> T:
        async def calling() -> T:
            return work()

        return self.run(calling())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        async def waiting() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        self.run(asyncio.wait_for(waiting(), WAIT_S))


def make_settings(data_dir: Path, **changes: object) -> ServingSettings:
    settings = ServingSettings(served_model_names=["tiny", "org/tiny-alias"], data_dir=data_dir)
    return msgspec.structs.replace(settings, **changes)


def digest_of(name: str) -> str:
    """Digest of an adapter that `register` made."""
    return hashlib.sha256(name.encode()).hexdigest()


async def register(
    control: ControlPlane,
    engine: FakeEngine,
    name: str,
    tenant: str = SHARED_TENANT,
    *,
    content: str | None = None,
    classifier: ClassifierRecord | None = None,
    chat_template: str | None = None,
) -> None:
    """Publish a version that only a `FakeEngine` can load. content: input of `digest_of`; None = the name."""
    digest = digest_of(content or name)
    packed_dir = control.declared.settings.data_dir / "packed"
    (packed_dir / packed_file_name(digest, engine.model.layout)).write_bytes(b"packed")
    published = Content(
        digest=digest,
        upload_id=f"upload of {content or name}",
        size_bytes=4096,
        max_rank=8,
        targets=["q_proj"],
        classifier=classifier,
        chat_template=chat_template,
    )
    await control.versions.publish(server_principal(tenant, "config"), "", name, published)


def tenant_of(control: ControlPlane, tenant: str) -> Document[TenantDoc]:
    found = control.catalog.tenant(tenant)
    assert found is not None
    return found


@contextmanager
def live_server(
    engine: FakeEngine,
    settings: ServingSettings,
    adapters: tuple[str, ...] = (),
    *,
    flag_keys: tuple[str, ...] = (),
    max_queued_per_tenant: int = 256,
) -> Iterator[LiveServer]:
    """adapters: names, for tenant `shared`. flag_keys: as given with --api-key."""
    with running_valkey(settings.data_dir) as valkey:
        control_settings = ControlSettings(
            data_dir=settings.data_dir,
            redis_url=valkey.url,
            redis_timeout_s=REDIS_TIMEOUT_S,
            served_names=settings.served_model_names,
            adapter_rules=AdapterRules(base_names=tuple(settings.base_names), chat_templates=()),
            flag_keys=list(flag_keys),
            max_queued=settings.limits.max_queued,
            max_queued_per_tenant=max_queued_per_tenant,
        )
        with _serving(engine, settings, control_settings, adapters, valkey) as server:
            yield server


@contextmanager
def _serving(
    engine: FakeEngine,
    settings: ServingSettings,
    control_settings: ControlSettings,
    adapters: tuple[str, ...],
    valkey: Valkey,
) -> Iterator[LiveServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers: list[tuple[uvicorn.Server, LiveServer]] = []

    async def serve() -> None:
        declared = await open_declared(control_settings)
        runtime = build_runtime(engine, settings, CatalogNames(declared.catalog))
        control = build_control(declared, runtime)
        await control.start()
        for name in adapters:
            await register(control, engine, name)
        context = AppContext.of(runtime, control)
        config = uvicorn.Config(create_app(context), log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        servers.append((server, LiveServer(url, engine, context, asyncio.get_running_loop(), valkey)))
        started.set()
        await server.serve(sockets=[listener])
        await context.calls.wait_settled()
        await control.close()
        context.runtime.tokenizer.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(WAIT_S)
    server, live = servers[0]
    try:
        yield live
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
