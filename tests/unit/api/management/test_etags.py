import pytest
from litestar.testing import RequestFactory

from loraserve.api.management.etags import expected_rev, has_seen, must_not_exist
from loraserve.serving.errors import ErrorCode, ServingError


def request(**headers: str):
    return RequestFactory().get("/", headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("given", "seen"), [('"7"', True), ('W/"7"', True), ('"6", "7"', True), ("*", True), ('"17"', False), ("7", False)]
)
def test_what_a_client_has_seen(given: str, seen: bool) -> None:
    assert has_seen(request(if_none_match=given), 7) is seen
    assert not has_seen(request(), 7)


def test_the_revision_that_a_change_is_for() -> None:
    assert expected_rev(request()) is None
    assert expected_rev(request(if_match="*")) is None
    assert expected_rev(request(if_match='"7"')) == 7


@pytest.mark.parametrize("given", ["7", '"x"', '"6", "7"', '"-1"', ""])
def test_an_etag_that_we_never_gave_matches_nothing(given: str) -> None:
    with pytest.raises(ServingError) as caught:
        expected_rev(request(if_match=given))
    assert caught.value.code is ErrorCode.PRECONDITION_FAILED


def test_a_put_may_be_only_to_create() -> None:
    assert must_not_exist(request(if_none_match="*"))
    assert not must_not_exist(request())
    with pytest.raises(ServingError):
        must_not_exist(request(if_none_match='"7"'))
