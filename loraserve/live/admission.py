"""Whether a request may start now, and its single final state: one script each, so both are atomic."""

from typing import Any

import msgspec

from loraserve.live.admission_records import (
    AdmitCall,
    AdmitReply,
    AlreadyEnded,
    Budget,
    FinishCall,
    FinishReply,
    Limited,
    LiveAdmitted,
    Measure,
    Scope,
    Stale,
    ViewChanged,
)
from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.leases import LEASE_MS, LiveLeases
from loraserve.live.requests import RECENT_REQUESTS, RECENT_S, REQUEST_S, EndedRequest
from loraserve.live.script_loader import load_script
from loraserve.live.server_link import Arg
from loraserve.live.view import LiveView
from loraserve.store.records import DocumentKind, Limits

NO_LIMIT = -1
NEVER = -1


class LiveAdmission:
    def __init__(self, connection: LiveConnection, names: KeyNames, view: LiveView, leases: LiveLeases) -> None:
        self._connection = connection
        self._names = names
        self._view = view
        self._leases = leases
        self._admit = load_script("admit", shared="buckets")
        self._finish = load_script("finish", shared="buckets")
        self._decoder = msgspec.json.Decoder(EndedRequest)

    async def admit(self, call: AdmitCall) -> AdmitReply:
        """All or nothing; repeating the same call takes nothing more. The lease is renewed until `finish`.

        Raises LiveUnavailableError; after that, or if cancelled, call `finish` with was_admitted=False.
        """
        view = self._view.accepted
        if view is None:
            return ViewChanged()
        keys = self._admit_keys(call)
        args = _admit_args(call, view.epoch)
        try:
            reply = await self._connection.run_script(self._admit, keys, args, view.run_id)
        except LiveRestartedError:
            self._view.forget()
            return ViewChanged()
        outcome = _parse_admit(_checked(reply, call.lease.request_id), self._decoder)
        if isinstance(outcome, LiveAdmitted):
            self._leases.hold(call.lease)
        elif isinstance(outcome, ViewChanged):
            self._view.forget()
        return outcome

    async def finish(self, call: FinishCall) -> FinishReply:
        """Only the first call sets the state. Always frees the leases. Raises LiveUnavailableError."""
        lease = call.lease
        await self._leases.drop(lease.request_id)
        names = self._names
        keys = [names.request(lease.request_id), names.recent_requests(lease.tenant), names.all_leases()]
        keys += [names.tenant_leases(lease.tenant), names.tenant_bucket(lease.tenant)]
        token_limits = [_number(call.tenant_limits.tokens_per_min)]
        if lease.key_id is not None:
            keys += [names.key_leases(lease.key_id), names.key_bucket(lease.key_id)]
            token_limits.append(_number(call.key_limits.tokens_per_min))
        args: list[Arg] = [lease.request_id, lease.member(), msgspec.json.encode(call.request)]
        args += [REQUEST_S, RECENT_REQUESTS, RECENT_S, call.unused_tokens, int(not call.was_admitted)]
        args += [len(token_limits), *token_limits]
        reply = await self._connection.run_script(self._finish, keys, args)
        outcome, request = _checked(reply, lease.request_id)
        return FinishReply(was_first=outcome == b"FIRST", request=self._decoder.decode(request))

    def _admit_keys(self, call: AdmitCall) -> list[str]:
        names, lease = self._names, call.lease
        keys = [names.meta(), names.request(lease.request_id), names.all_leases()]
        keys += [
            names.document(DocumentKind.TENANT, lease.tenant),
            names.tenant_leases(lease.tenant),
            names.tenant_bucket(lease.tenant),
        ]
        if lease.key_id is not None:
            keys += [
                names.document(DocumentKind.KEY, lease.key_id),
                names.key_leases(lease.key_id),
                names.key_bucket(lease.key_id),
            ]
        if call.adapter is not None:
            keys.append(names.document(DocumentKind.ADAPTER, call.adapter.id))
        return keys


def _admit_args(call: AdmitCall, epoch: str) -> list[Arg]:
    lease = call.lease
    if (lease.key_id is None) != (call.key_rev is None):
        raise ValueError(f"key {lease.key_id!r} with revision {call.key_rev!r}: both or neither")
    args: list[Arg] = [lease.request_id, lease.member(), epoch, LEASE_MS, call.reserve_tokens]
    args += [1 if call.key_rev is None else 2, call.tenant_rev, *_limit_args(call.tenant_limits)]
    if call.key_rev is not None:
        args += [call.key_rev, *_limit_args(call.key_limits)]
    if call.adapter is not None:
        args.append(call.adapter.rev)
    return args


def _limit_args(limits: Limits) -> list[int]:
    return [_number(limits.requests_per_min), _number(limits.tokens_per_min), _number(limits.max_concurrent)]


def _number(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit


def _checked(reply: list[Any], request_id: str) -> list[Any]:
    """Checks that the reply begins with the request id, and strips it."""
    if reply[0] != request_id.encode():
        raise LiveUnavailableError(f"Redis answered about request {reply[0]!r} instead of {request_id}")
    return reply[1:]


def _parse_admit(reply: list[Any], decoder: msgspec.json.Decoder[EndedRequest]) -> AdmitReply:
    match reply:
        case [b"OK", *numbers]:
            return LiveAdmitted(requests=_budget(numbers[:3]), tokens=_budget(numbers[3:]))
        case [b"LIMIT", scope, measure, limit, retry_ms]:
            return Limited(
                scope=Scope(scope.decode()),
                measure=Measure(measure.decode()),
                limit=limit,
                retry_ms=None if retry_ms == NEVER else retry_ms,
            )
        case [b"STALE", *scopes]:
            return Stale(scopes=[Scope(scope.decode()) for scope in scopes])
        case [b"ENDED", request]:
            return AlreadyEnded(request=decoder.decode(request))
        case [b"EPOCH"]:
            return ViewChanged()
    raise LiveUnavailableError(f"Redis answered {reply!r} to an admission")


def _budget(numbers: list[int]) -> Budget | None:
    limit, remaining, reset_ms = numbers
    return None if limit == NO_LIMIT else Budget(limit=limit, remaining=remaining, reset_ms=reset_ms)
