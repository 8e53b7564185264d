"""Whether two names are of one base model, which has as many as people have folders."""

from collections.abc import Iterable


def last_part(name: str) -> str:
    """Of a path or a Hugging Face name, without regard to upper and lower case."""
    return name.rstrip("/").rpartition("/")[2].casefold()


def is_base_name(name: str, base_names: Iterable[str]) -> bool:
    return last_part(name) in map(last_part, base_names)
