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
        ("\udcff", "%FF"),  # how Python represents an argument that is not UTF-8
    ],
)
def test_a_name_is_percent_encoded_as_one_path_segment(name: str, segment: str) -> None:
    path = api_path("adapters", name, "versions", 3)
    assert path == f"/v1/adapters/{segment}/versions/3"
    assert httpx.URL("http://server").join(path).raw_path.decode() == path


@pytest.mark.parametrize("name", ["", ".", "..", "../tenants/bob", "sql/x/..", "sql/versions/1", "sql/", "/"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(click.UsageError, match="is not a valid name"):
        api_path("adapters", name)
