import pytest
from litestar.testing import RequestFactory

from loraserve.api.management.answers import shown


@pytest.mark.parametrize(("seen", "status"), [(None, 200), ('"6"', 200), ('"7"', 304)])
def test_no_browser_keeps_an_answer_whose_etag_is_a_revision(seen: str | None, status: int) -> None:
    """Another tenant's document at the same URL may have the same one."""
    headers = {} if seen is None else {"if-none-match": seen}
    answer = shown(RequestFactory().get("/", headers=headers), 7, lambda: "the document")
    assert (answer.status_code or 200, answer.headers) == (status, {"etag": '"7"', "cache-control": "no-store"})
