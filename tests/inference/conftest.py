"""For all tests of inference."""

from functools import cache

import pytest

from tests.support.peft_oracle import OracleOf, make_oracle


@pytest.fixture(scope="session")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    """Each architecture's is made once: engines only read it, beside it they put the adapters they have packed."""
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture)))
