import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import Limits
from loraserve_adapters.packed import PackedAdapter

from loraserve.serving.adapter_service import AdapterService
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.registry import InProcessRegistry
from tests.support.fake_engine_client import FakeEngine, make_model
from tests.unit.adapters.folders import config_of, lora_tensors, tiny_layout, write_folder


def fake_packer(folder: Path, layout: BaseLayout, cache_dir: Path, *, limits: Limits) -> PackedAdapter:
    """The digest is the folder's name up to a dash."""
    if folder.name.startswith("bad"):
        raise AdapterError("unsupported_option", "use_dora is not supported")
    if folder.name.startswith("empty"):
        raise AdapterError("missing_file", "adapter_config.json is missing")
    if folder.name.startswith("full"):
        raise OSError(28, "No space left on device")
    time.sleep(0.01)
    digest = folder.name.partition("-")[0].ljust(64, "0")
    empty = np.empty(0)
    return PackedAdapter(digest, layout.fingerprint, "float32", 8, empty, empty, empty, empty, np.zeros(7, np.uint8))


def adapter_folder(folder: Path, rank: int = 4) -> Path:
    return write_folder(folder, config_of(r=rank), lora_tensors(tiny_layout(), ["q_proj"], rank))


class Setup:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.engine = FakeEngine()
        self.registry = InProcessRegistry()
        self.removed: list[str] = []
        self.service = AdapterService(
            self.engine,
            self.registry,
            base_names=["tiny"],
            packed_dir=tmp_path / "packed",
            on_removed=self.removed.append,
            unload_timeout_s=0.05,
            packer=fake_packer,
        )

    def folder(self, name: str) -> Path:
        path = self.tmp_path / name
        path.mkdir(exist_ok=True)
        return path


Scenario = Callable[[Setup], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    return lambda scenario: asyncio.run(scenario(Setup(tmp_path)))


def test_is_visible_only_after_the_engine_has_it(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        seen: list[bool] = []

        async def load(digest: str, packed_path: str) -> None:
            seen.append(setup.registry.resolve("sql") is not None)
            assert packed_path.startswith(str(setup.tmp_path / "packed" / digest))

        setup.engine.load = load  # pyright: ignore[reportAttributeAccessIssue]
        adapter = await setup.service.add("sql", setup.folder("d1"))
        assert seen == [False]
        assert setup.registry.resolve("sql") == adapter
        assert (adapter.max_lora_rank, adapter.size_bytes) == (8, 7)

    run(scenario)


def test_one_of_two_concurrent_adds_of_a_name_wins(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        adds = (setup.service.add("sql", setup.folder("d1")), setup.service.add("sql", setup.folder("d2")))
        first, second = await asyncio.gather(*adds, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, ServingError)
        assert second.code is ErrorCode.ADAPTER_ALREADY_LOADED
        assert "has already been loaded" in second.message
        assert setup.engine.loads == [first.digest]

    run(scenario)


def test_the_same_content_under_two_names_is_loaded_once_and_unloaded_last(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        await asyncio.gather(*(setup.service.add(name, setup.folder("d1")) for name in ("a", "b", "c")))
        assert len(setup.engine.loads) == 1
        await setup.service.remove("a")
        await setup.service.remove("b")
        assert setup.engine.unloads == []
        await setup.service.remove("c")
        assert setup.engine.unloads == setup.engine.loads
        assert setup.removed == ["a", "b", "c"]

    run(scenario)


def test_removal_is_visible_before_the_engine_lets_go(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        may_unload = asyncio.Event()
        order: list[str] = []

        async def unload(digest: str) -> None:
            assert setup.registry.resolve("sql") is None
            await may_unload.wait()
            order.append("unloaded")

        async def load(digest: str, packed_path: str) -> None:
            order.append("loaded")

        setup.engine.load, setup.engine.unload = load, unload  # pyright: ignore[reportAttributeAccessIssue]
        await setup.service.add("sql", setup.folder("d1"))
        await setup.service.remove("sql")  # Returns after unload_timeout_s although a sequence still runs.
        again = asyncio.create_task(setup.service.add("sql", setup.folder("d1")))
        other = await setup.service.add("other", setup.folder("d2"))
        assert other.name == "other"
        assert not again.done()
        may_unload.set()
        await again
        assert order == ["loaded", "loaded", "unloaded", "loaded"]

    run(scenario)


def test_replacing_swaps_at_once_and_unloads_the_old_content(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        old = await setup.service.add("sql", setup.folder("d1"))
        new = await setup.service.add("sql", setup.folder("d2"), replace=True)
        assert setup.registry.resolve("sql") == new
        assert setup.engine.unloads == [old.digest]
        same = await setup.service.add("sql", setup.folder("d2-copy"), replace=True)
        assert same.digest == new.digest
        assert setup.engine.unloads == [old.digest]
        assert setup.registry.has_digest(new.digest)

    run(scenario)


@pytest.mark.parametrize(
    ("name", "folder", "code"),
    [
        ("sql", "bad", ErrorCode.ADAPTER_INVALID),
        ("sql", "empty", ErrorCode.ADAPTER_NOT_FOUND),
        ("sql", "full", ErrorCode.INTERNAL_ERROR),
        ("sql", None, ErrorCode.ADAPTER_NOT_FOUND),
        ("tiny", "d1", ErrorCode.INVALID_VALUE),
        ("a/b", "d1", ErrorCode.INVALID_VALUE),
        ("a:b", "d1", ErrorCode.INVALID_VALUE),
        ("", "d1", ErrorCode.INVALID_VALUE),
        ("-x", "d1", ErrorCode.INVALID_VALUE),
        ("x" * 65, "d1", ErrorCode.INVALID_VALUE),
        ("sql\n", "d1", ErrorCode.INVALID_VALUE),
    ],
)
def test_refusals_leave_nothing(
    run: Callable[[Scenario], None], name: str, folder: str | None, code: ErrorCode
) -> None:
    async def scenario(setup: Setup) -> None:
        path = setup.folder(folder) if folder else setup.tmp_path / "not there"
        with pytest.raises(ServingError) as caught:
            await setup.service.add(name, path)
        assert caught.value.code is code
        assert setup.registry.list() == []
        assert setup.engine.loads == []

    run(scenario)


def test_links_are_followed_only_for_the_operator(tmp_path: Path) -> None:
    """A snapshot folder of Hugging Face's cache, read for real."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in adapter_folder(tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)

    async def add() -> None:
        engine = FakeEngine(model=make_model(layout=tiny_layout()))
        service = AdapterService(
            engine,
            InProcessRegistry(),
            base_names=["tiny"],
            packed_dir=tmp_path / "packed",
            on_removed=lambda name: None,
            limits=Limits(max_lora_rank=4),
        )
        with pytest.raises(ServingError, match="symbolic link") as caught:
            await service.add("sql", snapshot)
        assert caught.value.code is ErrorCode.ADAPTER_INVALID
        await service.add("sql", snapshot, follow_symlinks=True)
        assert len(engine.loads) == 1
        with pytest.raises(ServingError, match="at most 4"):
            await service.add("wide", adapter_folder(tmp_path / "wide", rank=5))

    asyncio.run(add())


def test_what_the_engine_refuses_is_not_registered(run: Callable[[Scenario], None]) -> None:
    async def scenario(setup: Setup) -> None:
        setup.engine.refuse_load = "it does not fit the arena"
        with pytest.raises(ServingError, match="does not fit the arena") as caught:
            await setup.service.add("sql", setup.folder("d1"))
        assert caught.value.code is ErrorCode.ADAPTER_INVALID
        assert setup.registry.resolve("sql") is None
        with pytest.raises(ServingError) as caught:
            await setup.service.remove("sql")
        assert caught.value.code is ErrorCode.ADAPTER_NOT_FOUND

    run(scenario)
