"""Queries that only macOS answers. Standard library only, like `c_compiler`."""

import subprocess


def sysctl(name: str) -> str:
    """The value; empty if this system does not have it."""
    return _output("/usr/sbin/sysctl", "-n", name) or ""


def has_command_line_tools() -> bool:
    """Without these tools, each compiler in /usr/bin opens a dialog that offers to install them."""
    return _output("/usr/bin/xcode-select", "-p") is not None


def _output(*command: str) -> str | None:
    """Stripped standard output; None if the command fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
