import contextlib

from loraserve.cli.serve.listen import base_url, bind_tcp


def test_an_ipv6_address_may_be_in_brackets_as_in_a_url() -> None:
    with contextlib.closing(bind_tcp("[::1]", 0)) as bound:
        assert base_url(bound) == f"http://[::1]:{bound.getsockname()[1]}"
