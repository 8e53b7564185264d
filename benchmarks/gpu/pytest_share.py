"""A plugin of pytest: of the tests it would run, `--share 1/4` runs the second quarter.

Neighbours stay together, so that a fixture of several tests is made in few of the shares.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", help="INDEX/NUMBER")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Last, so that what is shared out is what `-m` has left."""
    index, num_shares = map(int, str(config.getoption("share")).split("/"))
    first, end = (len(items) * each // num_shares for each in (index, index + 1))
    config.hook.pytest_deselected(items=items[:first] + items[end:])
    items[:] = items[first:end]
