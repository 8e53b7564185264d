"""Python's garbage collector, kept from walking what lives as long as the process."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """For imports: of the 570,000 objects that torch and transformers make, 2 % are garbage, and looking for it again
    and again took a quarter of the time. What the body made is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def calm_garbage_collector() -> None:
    """Once everything is there that lives as long as the process: look at that never again, and at the rest seldom.

    A large body, or a step of many sequences, makes thousands of objects. In the API process, decoding a body of
    480,000 short lists held up the event loop for 250 ms before and 60 ms after, a message with the logprobs of 100,000
    prompt tokens 530 ms and 80 ms (two busy cores of an EPYC). In an engine with a stand-in for a GPU, the host's part
    of a decode step of 256 sequences took 1.7 ms on average before and 0.8 to 1.2 after.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
