"""A week of made-up usage, written to a data directory as a server that ran that long would."""

import math
import random
import time
from pathlib import Path

from loraserve.store.usage_log import BilledOutcome, UsageLine, UsageLog

HOURS = 7 * 24
HOUR_S = 3600
TENANTS: dict[str, tuple[float, list[tuple[str | None, str | None, int | None]]]] = {
    "default": (9, [("support-tone", "default", 2), ("support-tone", "default", 1), ("sql-generation", "default", 1)]),
    "acme": (6, [("reverse", "shared", 1), ("spell", "shared", 1), (None, None, None)]),
    "globex": (3, [("uppercase", "shared", 1)]),
}
"""Requests per hour, and the models they use: (adapter, its owner, version)."""


def write_usage_history(data_dir: Path) -> None:
    """More by day than by night; the same at every call except for the time."""
    chance = random.Random(7)
    now = time.time()
    log = UsageLog(data_dir, "history")
    for hour in range(HOURS, 0, -1):
        begin = now - (hour + 1) * HOUR_S
        daylight = 1.2 - math.cos((begin / HOUR_S - 2) % 24 / 24 * 2 * math.pi)
        for tenant, (rate, models) in TENANTS.items():
            for number in range(round(rate * daylight * chance.uniform(0.6, 1.4))):
                log.append(_line(chance, f"made-up-{hour}-{tenant}-{number}", begin, tenant, chance.choice(models)))
    log.sync()


def _line(
    chance: random.Random, request_id: str, begin: float, tenant: str, model: tuple[str | None, str | None, int | None]
) -> UsageLine:
    adapter, owner, version = model
    prompt = chance.randint(60, 900)
    return UsageLine(
        request_id=request_id,
        at=begin + chance.uniform(0, HOUR_S),
        tenant=tenant,
        key_id=None,
        adapter=adapter,
        adapter_tenant=owner,
        version=version,
        digest=None if adapter is None else f"{adapter}-{version}".encode().hex().ljust(64, "0")[:64],
        prompt_tokens=prompt,
        cached_tokens=chance.choice([0, prompt // 2]),
        output_tokens=chance.randint(20, 400),
        outcome=BilledOutcome.ERROR if chance.random() < 0.01 else BilledOutcome.STOP,
        ttft_ms=chance.lognormvariate(4, 0.5),
        duration_ms=900.0,
    )
