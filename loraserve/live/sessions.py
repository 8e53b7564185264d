"""Console sessions, one-time login links, and responses kept for repeated requests."""

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.script_loader import load_script

SESSION_S = 12 * 3600
MAX_SESSIONS = 50
"""Per key: about 35 kB in Redis, which all tenants share."""
LINK_S = 15 * 60
IDEMPOTENCY_S = 24 * 3600
UNFINISHED_S = 60
"""A creation takes a few seconds at most; after this time its server counts as dead, and it can be repeated."""
NO_RESPONSE = msgspec.Raw(b"null")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    token_sha256: str
    """Hex; only the hash of the cookie is kept."""
    key_id: str
    """The session has this key's rights, as long as the key is valid."""
    key_sha256: str = ""
    """Hash of the secret that opened it; the session ends with that secret. Empty = created by a release that did not
    store it: such a session counts as ended."""
    csrf: str
    created_at: float


class LoginLink(msgspec.Struct, frozen=True, kw_only=True):
    token_sha256: str
    key_id: str
    key_sha256: str = ""
    """Hash of the key's secret at creation; the link ends with that secret. Empty: as for a session."""
    created_at: float


class IdempotencyRecord(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    client_key: str
    fingerprint: str
    """Hash of the request: the same key with another fingerprint is a conflict."""
    response: msgspec.Raw = NO_RESPONSE
    """A JSON object; null while the first request is in progress."""

    @property
    def is_done(self) -> bool:
        # NOTE: null decodes to `Raw(b"null")`, never to None.
        return self.response != NO_RESPONSE


class LiveSessions:
    """Every method raises LiveUnavailableError."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._put = load_script("session_put", "buckets")
        self._session_decoder = msgspec.json.Decoder(Session)
        self._link_decoder = msgspec.json.Decoder(LoginLink)
        self._record_decoder = msgspec.json.Decoder(IdempotencyRecord)

    async def put(self, session: Session) -> None:
        """If the key already has `MAX_SESSIONS`, its oldest session ends."""
        keys = [self._names.session(session.token_sha256), self._names.key_sessions(session.key_id)]
        args = [session.token_sha256, msgspec.json.encode(session), SESSION_S, MAX_SESSIONS]
        await self._connection.run_script(self._put, keys, args)

    async def get(self, token_sha256: str) -> Session | None:
        body = await self._connection.call("GET", self._names.session(token_sha256))
        if body is None:
            return None
        session = self._session_decoder.decode(body)
        return session if session.token_sha256 == token_sha256 else None

    async def remove(self, session: Session) -> None:
        await self._connection.call_many(
            [
                ["DEL", self._names.session(session.token_sha256)],
                ["ZREM", self._names.key_sessions(session.key_id), session.token_sha256],
            ]
        )

    async def put_link(self, link: LoginLink) -> None:
        name = self._names.login_link(link.token_sha256)
        await self._connection.call("SET", name, msgspec.json.encode(link), "EX", LINK_S)

    async def get_link(self, token_sha256: str) -> LoginLink | None:
        return self._link(token_sha256, await self._connection.call("GET", self._names.login_link(token_sha256)))

    async def take_link(self, token_sha256: str) -> LoginLink | None:
        """Only one caller ever gets it."""
        return self._link(token_sha256, await self._connection.call("GETDEL", self._names.login_link(token_sha256)))

    def _link(self, token_sha256: str, body: bytes | None) -> LoginLink | None:
        if body is None:
            return None
        link = self._link_decoder.decode(body)
        return link if link.token_sha256 == token_sha256 else None

    async def begin_idempotent(self, record: IdempotencyRecord) -> IdempotencyRecord | None:
        """None: the caller is the first and must call `end_idempotent`. Otherwise the first caller's record.

        A caller that does not end it within `UNFINISHED_S` counts as dead, and the next caller becomes the first.
        """
        name = self._names.idempotency(record.tenant, record.client_key)
        was_set = await self._connection.call("SET", name, msgspec.json.encode(record), "NX", "EX", UNFINISHED_S)
        if was_set is not None:
            return None
        body = await self._connection.call("GET", name)
        if body is None:
            return await self.begin_idempotent(record)
        found = self._record_decoder.decode(body)
        if (found.tenant, found.client_key) != (record.tenant, record.client_key):
            raise LiveUnavailableError("Redis answered with another caller's idempotency record")
        return found

    async def end_idempotent(self, record: IdempotencyRecord) -> None:
        """Stores the record with its response for `IDEMPOTENCY_S`."""
        name = self._names.idempotency(record.tenant, record.client_key)
        await self._connection.call("SET", name, msgspec.json.encode(record), "EX", IDEMPOTENCY_S)

    async def cancel_idempotent(self, tenant: str, client_key: str) -> None:
        """For failed work: a repeated request then does it again."""
        await self._connection.call("DEL", self._names.idempotency(tenant, client_key))
