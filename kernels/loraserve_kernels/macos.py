"""What only macOS can tell. Standard library only, as `c_compiler`."""

import subprocess


def sysctl(name: str) -> str:
    """The value; empty where this system does not have it."""
    return _output("/usr/sbin/sysctl", "-n", name) or ""


def has_command_line_tools() -> bool:
    """Without them each compiler in /usr/bin opens a dialog that offers to install them."""
    return _output("/usr/bin/xcode-select", "-p") is not None


def _output(*command: str) -> str | None:
    """None if the command fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
