"""A pytest plugin: with `--share 1/4`, runs the second quarter of the selected tests.

Neighbors stay together, so that few shares have to set up the same fixture.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", help="INDEX/NUMBER")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs last, so that it divides the tests that `-m` has left."""
    index, num_shares = map(int, str(config.getoption("share")).split("/"))
    first, end = (len(items) * each // num_shares for each in (index, index + 1))
    config.hook.pytest_deselected(items=items[:first] + items[end:])
    items[:] = items[first:end]
