import pytest
from litestar.testing import RequestFactory

from loraserve.api.management.etags import expected_rev, has_seen, must_not_exist, shown_etag
from loraserve.serving.errors import ErrorCode, ServingError

SHOWN, OTHER = "0123456789abcdef", "f" * 16


def request(**headers: str):
    return RequestFactory().get("/", headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (f'"7-{SHOWN}"', True),
        (f'W/"7-{SHOWN}"', True),
        (f'"6", "7-{SHOWN}"', True),
        ("*", True),
        (f'"17-{SHOWN}"', False),
        (f'"7-{OTHER}"', False),
        ('"7"', False),
        (f"7-{SHOWN}", False),
    ],
)
def test_if_none_match_shows_what_a_client_has_seen(given: str, seen: bool) -> None:
    assert has_seen(request(if_none_match=given), f'"7-{SHOWN}"') is seen
    assert not has_seen(request(), f'"7-{SHOWN}"')


def test_an_etag_depends_on_the_revision_and_on_the_content_shown() -> None:
    tags = [shown_etag(rev, shown) for rev in (7, 8) for shown in ({"status": "draining"}, {"status": "deleted"})]
    assert len(set(tags)) == 4
    assert tags[0] == shown_etag(7, {"status": "draining"})
    assert [expected_rev(request(if_match=tag)) for tag in tags] == [7, 7, 8, 8]


def test_if_match_gives_the_revision_that_a_change_is_for() -> None:
    assert expected_rev(request()) is None
    assert expected_rev(request(if_match="*")) is None
    assert expected_rev(request(if_match='"7"')) == 7
    assert expected_rev(request(if_match=f'"7-{SHOWN}"')) == 7


@pytest.mark.parametrize("given", ["7", '"x"', '"6", "7"', '"-1"', '"7-"', '"7-x"', ""])
def test_an_etag_that_the_server_never_sent_matches_nothing(given: str) -> None:
    with pytest.raises(ServingError) as caught:
        expected_rev(request(if_match=given))
    assert caught.value.code is ErrorCode.PRECONDITION_FAILED


def test_if_none_match_with_a_star_makes_a_put_create_only() -> None:
    assert must_not_exist(request(if_none_match="*"))
    assert not must_not_exist(request())
    with pytest.raises(ServingError):
        must_not_exist(request(if_none_match='"7"'))
