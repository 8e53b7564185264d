"""Hugging Face's cache as `hf download` leaves it: snapshots of links to blobs."""

from pathlib import Path

CONFIG = {"adapter_config.json": b"{}"}


def add_to_cache(cache: Path, name: str, files: dict[str, bytes] = CONFIG) -> Path:
    """Returns the snapshot's folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    for made in (folder / "refs", folder / "blobs", snapshot):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    for file, data in files.items():
        (folder / "blobs" / file).write_bytes(data)
        (snapshot / file).symlink_to(Path("../../blobs") / file)
    return snapshot
