"""Two servers with different base models on one Redis and one data directory."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from loraserve.control.adapters.queries import AdapterState
from loraserve.control.documents.adapter_edits import CanaryShare, versions_of
from loraserve.control.ingest.processes import DoesNotFitError
from loraserve.control.names.served_base import linears_fingerprint
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import AdapterDoc, Document, Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.adapters.folders import tiny_layout
from tests.unit.control.nodes import ACME, Node, content, run, running_node, with_tenants

__all__ = ["valkey"]

SMALL, LARGE = tiny_layout(num_layers=1), tiny_layout(num_layers=2)


@contextlib.asynccontextmanager
async def two_bases(data_dir: Path, url: str) -> AsyncIterator[tuple[Node, Node]]:
    async with (
        running_node(data_dir, url, follow=False, base_name="small", layout=SMALL) as small,
        running_node(data_dir, url, follow=False, base_name="large", layout=LARGE) as large,
    ):
        await with_tenants(small)
        yield small, large


async def refused(work: Awaitable[object]) -> ServingError:
    with pytest.raises(ServingError) as found:
        await work
    assert found.value.code is ErrorCode.ADAPTER_OTHER_BASE
    return found.value


def test_the_fingerprint_covers_the_linears_but_not_how_they_are_computed() -> None:
    fingerprints = {linears_fingerprint(layout) for layout in (SMALL, tiny_layout("bfloat16", 1))}
    one_by_one = replace(SMALL, groups=tuple((module,) for group in reversed(SMALL.groups) for module in group))
    assert fingerprints == {linears_fingerprint(one_by_one)}
    wider = replace(SMALL, groups=(*SMALL.groups[:-1], (replace(SMALL.groups[-1][0], out_features=5),)))
    assert len({linears_fingerprint(layout) for layout in (SMALL, LARGE, wider)}) == 3


def test_a_version_for_another_base_is_refused_if_requested_and_not_listed_as_a_model(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_bases(tmp_path / "data", valkey.url) as (small, large):
            await small.publish("sql", "for small")
            assert (await small.admit(ACME, "sql")).target.adapter is not None
            for name in ("sql", "sql@v1", "sql@live"):
                error = await refused(large.resolver.resolve(ACME, name))
                assert "Version 1 of 'sql'" in error.message
                assert "'small'" in error.message
                assert "'large'" in error.message
                assert error.headers["x-should-retry"] == "false"
            await large.publish("poet", "for large")
            await small.catalog.catch_up()
            for node, names in ((small, ["sql"]), (large, ["poet"])):
                assert [document.doc.name for document in node.resolver.visible(ACME)] == names
            states = {found.doc.name: large.adapters.state_of(found) for found in large.adapters.list(ACME).items}
            assert states == {"sql": AdapterState.OTHER_BASE, "poet": AdapterState.READY}

    run(scenario)


def test_versions_for_another_base_cannot_be_given_an_alias_pinned_or_restored(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_bases(tmp_path / "data", valkey.url) as (small, large):
            await small.publish("sql", "for small")
            await large.publish("sql", "for large", activate=False)
            for canary in (None, CanaryShare(2, 5000)):
                await refused(large.aliases.put(ACME, "r", "sql", "beta", 1, canary=canary))
            await refused(large.aliases.put(ACME, "r", "sql", "beta", 2, canary=CanaryShare(1, 5000)))
            await refused(large.adapters.pin(ACME, "r", "sql", Tier.HOST, 60))
            await large.aliases.put(ACME, "r", "sql", "live", 2)
            await refused(large.aliases.rollback(ACME, "r", "sql"))
            assert (await large.admit(ACME, "sql")).target.adapter is not None
            await large.adapters.delete(ACME, "r", "sql", drain_s=0)
            await refused(small.adapters.restore(ACME, "r", "sql"))
            await large.adapters.restore(ACME, "r", "sql")

    run(scenario)


def test_the_same_content_uploaded_for_both_bases_is_one_version_that_both_serve(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_bases(tmp_path / "data", valkey.url) as (small, large):
            await small.publish("sql", "fits both")
            await large.publish("sql", "fits both")
            await large.publish("sql", "fits both")
            # A change that another server made a moment ago counts.
            for node in (small, large):
                target = await node.resolver.resolve(ACME, "sql")
                assert target.adapter is not None
                assert target.adapter.version == 1
            (version,) = versions_of((await small.adapters.read(ACME, "sql")).doc)
            assert [base.name for base in version.bases] == ["small", "large"]

    run(scenario)


def test_a_pin_of_an_adapter_for_another_base_is_left_to_the_servers_of_that_base(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_bases(tmp_path / "data", valkey.url) as (small, large):
            digest = await small.publish("sql", "for small")
            await small.adapters.pin(ACME, "r", "sql", Tier.HOST, 60)
            await large.catalog.catch_up()
            await large.pins.keep()
            assert (small.engine.known.keys(), large.engine.known.keys()) == ({digest}, set())

    run(scenario)


def test_content_with_no_recorded_base_that_does_not_fit_is_refused_when_it_is_loaded(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_bases(tmp_path / "data", valkey.url) as (small, large):
            digest = await small.publish("sql", "for small")
            document = without_bases(await small.adapters.read(ACME, "sql"))
            small.documents.commit(document)
            await large.catalog.catch_up()
            assert (await large.resolver.resolve(ACME, "sql")).adapter is not None
            assert large.adapters.state_of(document) is AdapterState.READY
            large.packer.error = DoesNotFitError(digest, "model.layers.0.q_proj is 16 x 16, not 8 x 8")
            async with small.residency.hold(digest):
                error = await refused(large.residency.load(digest))
            assert "'large'" in error.message
            assert "not 8 x 8" in error.message
            # Uploading it again records the base that it fits.
            await small.versions.publish(ACME, "r", "sql", content(digest))
            await large.catalog.catch_up()
            await refused(large.resolver.resolve(ACME, "sql"))

    run(scenario)


def without_bases(document: Document[AdapterDoc]) -> Document[AdapterDoc]:
    """The next revision, as it was written before bases were recorded."""
    versions = [msgspec.structs.replace(version, bases=[]) for version in document.doc.versions]
    doc = msgspec.structs.replace(document.doc, versions=versions)
    return msgspec.structs.replace(document, rev=document.rev + 1, doc=doc)
