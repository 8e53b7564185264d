"""Fixtures for all inference tests."""

from functools import cache

import pytest

from tests.support.peft_oracle import OracleOf, make_oracle


@pytest.fixture(scope="session")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    """Makes each architecture's oracle once: engines only read it, and store packed adapters next to it."""
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture)))
