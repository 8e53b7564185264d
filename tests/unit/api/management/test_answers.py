import pytest
from litestar.testing import RequestFactory

from loraserve.api.management.answers import shown
from loraserve.api.management.etags import shown_etag

ETAG = shown_etag(7, "the document")


@pytest.mark.parametrize(("seen", "status"), [(None, 200), ('"7"', 200), (ETAG, 304)])
def test_no_browser_keeps_an_answer_whose_url_is_one_for_each_tenants_document(seen: str | None, status: int) -> None:
    headers = {} if seen is None else {"if-none-match": seen}
    answer = shown(RequestFactory().get("/", headers=headers), 7, "the document")
    assert (answer.status_code or 200, answer.headers) == (status, {"etag": ETAG, "cache-control": "no-store"})


def test_what_has_changed_without_a_revision_is_shown_again() -> None:
    """An adapter that drains, a version that is loaded, an hour's requests."""
    headers = {"if-none-match": shown_etag(7, "draining")}
    answer = shown(RequestFactory().get("/", headers=headers), 7, "deleted")
    assert (answer.status_code, answer.content) == (None, "deleted")
