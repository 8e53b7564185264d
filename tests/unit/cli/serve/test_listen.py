import contextlib

import pytest

from loraserve.cli.serve.listen import ListenError, base_url, bind_tcp, listen


def test_an_ipv6_address_may_be_in_brackets_as_in_a_url() -> None:
    with contextlib.closing(bind_tcp("[::1]", 0)) as bound:
        assert base_url(bound) == f"http://[::1]:{bound.getsockname()[1]}"


def test_of_two_servers_that_start_on_one_port_the_second_one_names_it() -> None:
    with contextlib.closing(bind_tcp("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with contextlib.closing(bind_tcp("127.0.0.1", port)) as second:
            listen(first)
            with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use; .* choose another --port"):
                listen(second)
