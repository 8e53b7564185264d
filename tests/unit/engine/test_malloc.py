from loraserve.engine.malloc import with_huge_pages


def test_large_blocks_ask_for_huge_pages() -> None:
    assert with_huge_pages({"HOME": "/root"}) == {"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_other_tunables_stay() -> None:
    environment = with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}


def test_what_the_user_chose_stays() -> None:
    chosen = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert with_huge_pages(chosen) == chosen
