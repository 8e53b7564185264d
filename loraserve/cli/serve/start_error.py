"""Why a command cannot begin."""


class StartError(Exception):
    """The message is one line for a person."""
