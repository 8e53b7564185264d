"""Measures the nesting depth of JSON before it is decoded."""

import numpy as np

STEPS = bytes({ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255}.get(byte, 0) for byte in range(256))
"""Each byte's change of the depth, as int8."""
NOT_BRACKETS = bytes(byte for byte in range(256) if STEPS[byte] == 0)


def nesting_depth(body: bytes, enough: int) -> int:
    """The depth of valid JSON; exact only above `enough`. 2 MB of brackets, quotes or escapes take 10 ms."""
    if body.count(b"[") + body.count(b"{") <= enough:
        return 0
    # Without escapes, every other piece between quotation marks is outside strings.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(STEPS, NOT_BRACKETS)
    return int(np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32).max(initial=0))
