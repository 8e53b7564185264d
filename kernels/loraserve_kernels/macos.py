"""What only macOS can tell. Standard library only, as `c_compiler`."""

import subprocess


def sysctl(name: str) -> str:
    """The value; empty where this system does not have it."""
    return _output("/usr/sbin/sysctl", "-n", name) or ""


def _output(*command: str) -> str | None:
    """None if the command fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
