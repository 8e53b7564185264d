import pytest

from loraserve.live.key_names import KeyNames, usage_field


def test_all_names_share_one_hash_tag() -> None:
    names = KeyNames("prod")
    found = [
        names.meta(),
        names.document("adapter", "acme/poet"),
        names.document_ids("adapter"),
        names.changes(),
        names.tenant_bucket("acme"),
        names.all_leases(),
        names.request("r1"),
        names.snapshot("e", "engine-1"),
        names.usage_hour("acme", "2026010112"),
        names.series("engine-1", 10),
        names.session("0" * 64),
        names.key_sessions("0" * 64),
        names.idempotency("acme", "any } { : text"),
    ]
    assert all(name.startswith("{prod}:") and name.count("{") == 1 for name in found)
    assert len(set(found)) == len(found)


def test_names_have_the_documented_form() -> None:
    names = KeyNames()
    assert names.document("key", "k1") == "{ls}:d:key:k1"
    assert names.tenant_leases("acme") == "{ls}:l:t:acme"
    assert names.usage_day("acme", "20260101") == "{ls}:u:acme:d:20260101"
    assert names.series("e1", 60) == "{ls}:m:e1:60s"


@pytest.mark.parametrize("part", ["a:h:1", "", "a b", "a{b}", "a\nb", "a,b", "x" * 513])
def test_a_part_that_could_alter_the_key_structure_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a key"):
        KeyNames().tenant_bucket(part)


@pytest.mark.parametrize("prefix", ["", "a}b", "a b", "x" * 33])
def test_a_prefix_that_breaks_the_hash_tag_is_refused_naming_its_flag(prefix: str) -> None:
    with pytest.raises(ValueError, match="--redis-prefix"):
        KeyNames(prefix)


def test_a_usage_counter_is_one_field() -> None:
    assert usage_field("k1", "acme/poet", 3, "output_tokens") == "k1,acme/poet,3,output_tokens"
    with pytest.raises(ValueError, match="usage counter"):
        usage_field("k1", "a,b", 3, "output_tokens")
