"""The type of options that take a number with a fraction."""

import math
from typing import Any

import rich_click as click


class NumberRange(click.FloatRange):
    """Refuses NaN, which click accepts because it is neither below nor above a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number
