from pathlib import Path

import pytest
from msgspec.structs import replace

from loraserve.control.contents.smoke import PROMPT_TOKENS, SmokeTest
from loraserve.engine.request import LabelActivation, to_classify
from loraserve.serving.errors import ServingError
from loraserve.store.records import ClassifierRecord
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, content, eventually, run, running_node, with_tenants

__all__ = ["valkey"]


async def publish_tried(node: Node, digest: str) -> None:
    async with SmokeTest(node.engine, node.residency)(content(digest)):
        await node.versions.publish(ACME, "r", "sql", content(digest))


def test_content_published_after_its_smoke_test_is_not_loaded_again(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = node.put_blob("one")
            await publish_tried(node, digest)
            assert [request.adapter_digest for request in node.engine.requests] == [digest]
            async with node.residency.hold(digest):
                assert (node.engine.loads, node.engine.unloads) == ([digest], [])

    run(scenario)


def test_an_activated_adapter_is_tried_after_its_invocation_tokens(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            digest = node.put_blob("one")
            activated = replace(content(digest), invocation_token_ids=[5, 3])
            async with SmokeTest(node.engine, node.residency)(activated):
                pass
            (request,) = node.engine.requests
            assert request.pooling is None
            assert request.prompt_token_ids[:2] == [5, 3]
            assert len(request.prompt_token_ids) == 2 + PROMPT_TOKENS

    run(scenario)


def test_a_classifier_is_tried_with_a_classification_request(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            digest = node.put_blob("one")
            classifier = replace(content(digest), classifier=ClassifierRecord(num_labels=3))
            async with SmokeTest(node.engine, node.residency)(classifier):
                pass
            (request,) = node.engine.requests
            assert request.pooling == to_classify(LabelActivation.NONE)

    run(scenario)


@pytest.mark.parametrize("is_passed", [True, False])
def test_content_that_is_not_published_after_its_smoke_test_is_unloaded(
    valkey: Valkey, tmp_path: Path, is_passed: bool
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            digest = node.put_blob("one")
            node.engine.fail_with = None if is_passed else "no"
            with pytest.raises(ServingError, match="acme" if is_passed else "The first generation"):
                await publish_tried(node, digest)  # for a tenant that does not exist
            await eventually(lambda: node.engine.unloads == [digest])

    run(scenario)
