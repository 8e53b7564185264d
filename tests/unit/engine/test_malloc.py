from loraserve.engine.malloc import with_huge_pages


def test_huge_pages_are_requested_from_glibc() -> None:
    assert with_huge_pages({"HOME": "/root"}) == {"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_other_tunables_are_kept() -> None:
    environment = with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}


def test_the_users_hugetlb_setting_is_kept() -> None:
    chosen = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert with_huge_pages(chosen) == chosen
