"""Whether Redis matches the disk: its schema, its epoch, and the server process that was compared with the disk."""

import secrets
import time

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveRestartedError, LiveSchemaError
from loraserve.live.key_names import KeyNames
from loraserve.live.script_loader import load_script
from loraserve.live.server_link import parse_run_id

SCHEMA_VERSION = 1


class ViewMark(msgspec.Struct, frozen=True, kw_only=True):
    """The start of putting all documents."""

    run_id: str
    generation: int
    """Generation of the connection's links."""
    token: str


class AcceptedView(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    generation: int
    """Generation of the connection's links: a server that was a replica in between may hold older documents."""
    epoch: str
    """Created whenever an empty Redis is filled."""


class LiveView:
    """`begin`, put the newest revision of every document, `accept`: from then on admission uses current documents."""

    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._accept = load_script("view_accept")
        self._probe = load_script("probe")
        self._accepted: AcceptedView | None = None

    @property
    def accepted(self) -> AcceptedView | None:
        """None: documents must be compared first."""
        accepted = self._accepted
        return accepted if accepted is not None and accepted.generation == self._connection.generation else None

    async def check_schema(self) -> None:
        """Raises LiveSchemaError, LiveUnavailableError."""
        schema = await self._connection.call("HGET", self._names.meta(), "schema")
        if schema is not None and schema != str(SCHEMA_VERSION).encode():
            raise LiveSchemaError(
                f"the keys {self._names.meta().removesuffix('meta')}* in Redis have schema version {schema.decode()}; "
                f"this loraserve uses {SCHEMA_VERSION}: start it with another --redis-prefix, or delete those keys"
            )

    async def begin(self) -> ViewMark:
        """Raises LiveSchemaError, LiveUnavailableError."""
        await self.check_schema()
        token, generation = secrets.token_hex(8), self._connection.generation
        info, _ = await self._connection.call_many(
            [["INFO", "server"], ["HSET", self._names.meta(), f"building:{token}", int(time.time())]]
        )
        return ViewMark(run_id=parse_run_id(info), generation=generation, token=token)

    async def accept(self, mark: ViewMark) -> bool:
        """False: Redis was emptied, restarted or replaced since `begin`; begin again. Raises LiveUnavailableError."""
        args = [mark.token, SCHEMA_VERSION, secrets.token_hex(8)]
        try:
            epoch: bytes = await self._connection.run_script(self._accept, [self._names.meta()], args, mark.run_id)
        except LiveRestartedError:
            return False
        if not epoch:
            return False
        self._accepted = AcceptedView(run_id=mark.run_id, generation=mark.generation, epoch=epoch.decode())
        return self.accepted is not None

    def forget(self) -> None:
        """`admit` answers ViewChanged until the next `accept`."""
        self._accepted = None

    async def is_current(self) -> bool:
        """False: compare documents again. `admit` detects this by itself; this call is for processes without requests.

        Raises LiveUnavailableError, also for a server that would refuse `admit`: a server that cannot save its data
        answers reads but takes no writes, and our user there may have lost the right to run scripts.
        """
        accepted = self.accepted
        if accepted is None:
            return False
        await self._connection.run_script(self._probe, [self._names.probe()], [])
        info, epoch = await self._connection.call_many([["INFO", "server"], ["HGET", self._names.meta(), "epoch"]])
        if self.accepted is accepted and (parse_run_id(info), epoch) != (accepted.run_id, accepted.epoch.encode()):
            self.forget()
        return self.accepted is not None
