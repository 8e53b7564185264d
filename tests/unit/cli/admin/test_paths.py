import httpx
import pytest
import rich_click as click

from loraserve.cli.admin.paths import api_path


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("sql-v2.1_x", "sql-v2.1_x"),
        ("sql#old", "sql%23old"),
        ("sql?x=1;y", "sql%3Fx%3D1%3By"),
        ("%2e%2e", "%252e%252e"),
        ("a b", "a%20b"),
        ("ü", "%C3%BC"),
        ("\udcff", "%FF"),  # as a terminal gives what is no UTF-8
    ],
)
def test_a_name_reaches_the_server_as_it_was_typed(name: str, segment: str) -> None:
    path = api_path("adapters", name, "versions", 3)
    assert path == f"/v1/adapters/{segment}/versions/3"
    assert httpx.URL("http://server").join(path).raw_path.decode() == path


@pytest.mark.parametrize("name", ["", ".", "..", "../tenants/bob", "sql/x/..", "sql/versions/1", "sql/", "/"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(click.UsageError, match="is not a valid name"):
        api_path("adapters", name)
