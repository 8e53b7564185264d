"""Opens the data directory, Redis and the declared documents for a server."""

import contextlib
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from shlex import quote

from loraserve_adapters.limits import DEFAULT_LIMITS
from loraserve_adapters.rules import AdapterRules

from loraserve.cli.serve.settings import ServeSettings
from loraserve.cli.serve.start_error import StartError
from loraserve.control.declared import ControlSettings, Declared, open_declared
from loraserve.live.errors import LiveError, LiveUnavailableError
from loraserve.live.private_server import PrivateServer
from loraserve.store.errors import StoreError


@contextlib.asynccontextmanager
async def opened_declared(settings: ServeSettings) -> AsyncGenerator[Declared]:
    """Starts a private Redis unless --redis-url is given. Enter it inside `start_errors`."""
    settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        is_alone = False
        if (url := settings.redis_url) is None:
            private = await stack.enter_async_context(PrivateServer(settings.data_path))
            url, is_alone = private.url, private.is_owner
        declared = await open_declared(_control_settings(settings, url))
        stack.push_async_callback(declared.live.close)
        if is_alone:
            # Leases of a server that was killed while publishing would keep its tenant's uploads waiting for 15 s. A
            # server that joined another one's Redis must not take that server's leases.
            await declared.live.publish_leases.drop_all()
        _check_reachable_only_with_admin(settings, declared)
        yield declared


@contextlib.contextmanager
def start_errors(settings: ServeSettings) -> Generator[None]:
    """Turns errors of the data directory or Redis into a `StartError`. For the start only."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        raise StartError(f"--data-dir {settings.data_path} cannot be used: {reason}") from error
    except LiveUnavailableError as error:
        redis = "the private Valkey" if settings.redis_url is None else "the Redis of --redis-url"
        raise StartError(f"{redis} cannot be used: {error.reason.removeprefix('Redis: ')}") from error
    except (LiveError, StoreError) as error:
        raise StartError(str(error)) from error


def _control_settings(settings: ServeSettings, redis_url: str) -> ControlSettings:
    return ControlSettings(
        data_dir=settings.data_path,
        redis_url=redis_url,
        redis_prefix=settings.redis_prefix,
        redis_grace_s=settings.redis_grace_s,
        served_names=list(settings.model_names),
        adapter_rules=_adapter_rules(settings),
        flag_keys=list(settings.api_key),
        keep_versions=settings.keep_versions,
        max_queued=settings.max_queued,
        max_queued_per_tenant=settings.max_queued_per_tenant,
    )


def _adapter_rules(settings: ServeSettings) -> AdapterRules:
    limits, max_lora_rank = DEFAULT_LIMITS, settings.max_lora_rank
    return AdapterRules(
        limits if max_lora_rank is None else replace(limits, max_lora_rank=max_lora_rank),
        tuple(settings.serving.base_names),
        tuple(template.name for template in settings.adapter_chat_templates),
    )


def _check_reachable_only_with_admin(settings: ServeSettings, declared: Declared) -> None:
    if settings.is_on_loopback or declared.authenticator.has_admin:
        return
    default = " (the default with --api-key)" if settings.host is None else ""
    infers_only = "; a key given with --api-key can only infer" if settings.api_key else ""
    raise StartError(
        f"on {settings.bind_host}{default} other machines can reach the server, but it has no admin key{infers_only}. "
        f"Create an admin key with `loraserve keys create --role admin --data-dir {quote(str(settings.data_path))}`, "
        "or start with --host 127.0.0.1"
    )
