"""The text of API keys: `ls-<id>_<secret>`. Only its hash is ever kept."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 8
SECRET_BYTES = 32
_KEY = re.compile(rf"ls-([{ID_ALPHABET}]{{{ID_LENGTH}}})_[A-Za-z0-9_-]{{20,128}}")


@dataclass(frozen=True, slots=True)
class NewKey:
    id: str
    text: str
    """What the client sends. Shown once."""
    sha256: str


def generate_key(key_id: str | None = None) -> NewKey:
    """key_id: an existing key that gets a new secret; None = a new key."""
    key_id = key_id or "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))
    text = f"ls-{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    return NewKey(key_id, text, hash_key(text))


def hash_key(text: str) -> str:
    """Plain SHA-256 is enough: the secret has 256 random bits, so it cannot be guessed."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def try_parse_id(text: str) -> str | None:
    """The key's id; None if the text cannot be one of our keys."""
    match = _KEY.fullmatch(text)
    return match.group(1) if match else None


def is_key(text: str, sha256: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(hash_key(text), sha256)
