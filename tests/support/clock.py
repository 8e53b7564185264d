"""A clock that stands still until a test sets it."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        """In seconds."""

    def __call__(self) -> float:
        return self.now
