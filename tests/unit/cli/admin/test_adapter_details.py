from typing import Any

import msgspec
import pytest

from loraserve.api.schemas.adapters import AdapterItem
from loraserve.api.schemas.aliases import AliasItem
from loraserve.api.schemas.examples import EXAMPLES
from loraserve.api.schemas.versions import VersionItem
from loraserve.cli.admin.adapter_details import print_adapter


def example_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return msgspec.to_builtins(next(each for each in EXAMPLES if isinstance(each, kind)))


def shown(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """What is printed of the adapter in the API reference, with changes to its version."""
    adapter, alias, version = (example_of(kind) for kind in (AdapterItem, AliasItem, VersionItem))
    print_adapter({**adapter, "aliases": [alias], "versions": [version | changes]})
    return " ".join(capsys.readouterr().out.split())


def test_particulars_of_versions_are_listed_only_if_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown(capsys)
    for heading in ("variant", "activated by", "labels", "chat template", "trained tokens", "own tables"):
        assert heading not in plain
    assert "trained tokens" in shown(capsys, trained_token_ids=[3, 5, 8])
    found = shown(capsys, own_tables=["model.embed_tokens", "lm_head"])
    assert "own tables" in found
    assert "model.embed_tokens, lm_head" in found


def test_a_version_with_dora_or_rslora_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for variant, name in (({"use_dora": True}, "DoRA"), ({"use_rslora": True}, "rsLoRA")):
        found = shown(capsys, **variant)
        assert "variant" in found
        assert name in found
    assert "DoRA, rsLoRA" in shown(capsys, use_dora=True, use_rslora=True)


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_chat_template_that_the_server_lacks_is_marked(capsys: pytest.CaptureFixture[str], is_missing: bool) -> None:
    found = shown(capsys, chat_template="brief", chat_template_missing=is_missing)
    assert "brief" in found
    assert ("brief (missing here)" in found) == is_missing
