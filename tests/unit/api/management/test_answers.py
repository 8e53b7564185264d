import pytest
from litestar.testing import RequestFactory

from loraserve.api.management.answers import shown
from loraserve.api.management.etags import shown_etag

ETAG = shown_etag(7, "the document")


@pytest.mark.parametrize(("seen", "status"), [(None, 200), ('"7"', 200), (ETAG, 304)])
def test_browsers_do_not_store_answers_whose_url_all_tenants_share(seen: str | None, status: int) -> None:
    headers = {} if seen is None else {"if-none-match": seen}
    answer = shown(RequestFactory().get("/", headers=headers), 7, "the document")
    assert (answer.status_code or 200, answer.headers) == (status, {"etag": ETAG, "cache-control": "no-store"})


def test_content_that_changed_without_a_new_revision_is_sent_again() -> None:
    """For example, a draining adapter, a loaded version or the requests of an hour."""
    headers = {"if-none-match": shown_etag(7, "draining")}
    answer = shown(RequestFactory().get("/", headers=headers), 7, "deleted")
    assert (answer.status_code, answer.content) == (None, "deleted")
