import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.store.errors import InvalidNameError
from loraserve.store.names import (
    AdapterRef,
    BaseRef,
    check_adapter_name,
    check_alias_name,
    check_tenant_name,
    parse_model_ref,
)

BASES = ["org/tiny-base", "tiny", "with:colon", "tiny:large"]


@pytest.mark.parametrize(
    ("model", "meaning"),
    [
        ("tiny", BaseRef()),
        ("org/tiny-base", BaseRef()),
        ("with:colon", BaseRef()),
        ("with:colon:sql", AdapterRef("sql")),
        ("tiny:large", BaseRef()),
        ("sql", AdapterRef("sql")),
        ("sql@live", AdapterRef("sql")),
        ("sql@staging", AdapterRef("sql", alias="staging")),
        ("sql@v3", AdapterRef("sql", version=3)),
        ("sql@V3", AdapterRef("sql", alias="V3")),
        ("tiny:sql", AdapterRef("sql")),
        ("org/tiny-base:sql@v12", AdapterRef("sql", version=12)),
        ("tiny:tiny", AdapterRef("tiny")),
    ],
)
def test_a_model_name_is_parsed_as_base_or_adapter(model: str, meaning: BaseRef | AdapterRef) -> None:
    assert parse_model_ref(model, BASES) == meaning


@pytest.mark.parametrize(
    "model",
    [
        *(
            "",
            ":",
            "tiny:",
            "@",
            "sql@",
            "@v3",
            "sql@v0",
            "sql@v03",
            "sql@v3x@y",
            "sql@v" + "9" * 30,
            "sql@v3\n",
            "sql@v1٣",
        ),
        *("other:sql", "tiny:org/x", "tiny@v1:", "a/b", "../etc", "sql\n", " sql", "ünicode", "x" * 65),
    ],
)
def test_an_invalid_model_name_is_parsed_as_none(model: str) -> None:
    assert parse_model_ref(model, BASES) is None


@given(st.text(max_size=80))
def test_any_text_is_parsed_as_a_valid_reference_or_none(model: str) -> None:
    meaning = parse_model_ref(model, BASES)
    if isinstance(meaning, AdapterRef):
        check_adapter_name(meaning.name, [])
        check_alias_name(meaning.alias)


@pytest.mark.parametrize("name", ["sql", "A", "0", "a.b_c-d", "x" * 64, "v3"])
def test_valid_names_are_accepted(name: str) -> None:
    check_adapter_name(name, BASES)
    check_tenant_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "a/b", "a@b", "a:b", "a b", "x" * 65, "a\n", "é", "\0", "*"]
)
def test_invalid_names_are_refused_naming_the_allowed_characters(name: str) -> None:
    for check in (check_tenant_name, check_alias_name, lambda name: check_adapter_name(name, BASES)):
        with pytest.raises(InvalidNameError, match="use 1 to 64 letters") as caught:
            check(name)
        assert str(caught.value).isprintable()


def test_an_adapter_name_equal_to_the_base_model_is_refused() -> None:
    with pytest.raises(InvalidNameError, match="the base model's name"):
        check_adapter_name("tiny", BASES)


@pytest.mark.parametrize("name", ["v3", "v0", "v123456789012"])
def test_an_alias_name_that_looks_like_a_version_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        check_alias_name(name)


@pytest.mark.parametrize("name", ["v3a", "V3", "v", "live", "version3"])
def test_alias_names_that_are_no_versions_are_accepted(name: str) -> None:
    check_alias_name(name)


def test_a_very_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(InvalidNameError) as caught:
        check_tenant_name("x" * 100_000)
    assert "100000 characters" in str(caught.value)
    assert len(str(caught.value)) < 300
