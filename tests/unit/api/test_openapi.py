from pathlib import Path

from loraserve.api.app import openapi_document

COMMITTED = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_the_committed_document_is_up_to_date() -> None:
    assert COMMITTED.read_bytes() == openapi_document(), "run `make openapi`"
