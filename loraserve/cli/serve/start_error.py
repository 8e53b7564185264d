"""The error of a server that cannot start."""


class StartError(Exception):
    """The message is one line, shown to the user."""
