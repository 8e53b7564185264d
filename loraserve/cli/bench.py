"""`loraserve bench`: the options. The load test itself is in `loadtest/`."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from random import randrange
from typing import Any

import rich_click as click
from click.core import ParameterSource

from loraserve.cli.loadtest.lengths import LengthLaw
from loraserve.cli.loadtest.popularity import Distribution
from loraserve.cli.loadtest.server_kind import ServerKind
from loraserve.cli.loadtest.settings import SLORA_TRACE, BenchSettings
from loraserve.cli.number_range import NumberRange

NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
MAX_SEED = 1_000_000
REPLACED_BY_REQUESTS = ("adapters", "num_adapters", "distribution", "trace", "num_requests", "duration", "prefixes")
"""Options that a file of requests replaces. Options for lengths are allowed: they apply to the warm-up."""
SPREAD_HELP = "uniform: mean ± spread; normal: deviation."


def _values(choices: type[StrEnum]) -> list[str]:
    return [choice.value for choice in choices]


def _in_a_folder(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Checked before the load test, so that its report is not lost."""
    if path and not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path.parent} is not a writable folder")
    return path


@click.command(context_settings={"show_default": True})
@click.argument("url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL")
@click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
@click.option(
    "--server",
    type=click.Choice(["auto", *_values(ServerKind)]),
    default="auto",
    help="Decides which request fields to send.",
)
@click.option(
    "--adapters", default="all", help="Models to request: a,b,c; @FILE, one name per line; all adapters; or base."
)
@click.option("--num-adapters", type=click.IntRange(1), help="Use only this many, the first ones.")
@click.option("--distribution", type=click.Choice(_values(Distribution)), default=Distribution.ROUND_ROBIN.value)
@click.option("--zipf-s", type=NumberRange(0), default=1.0, help="Skew of --distribution zipf.")
@click.option(
    "--power-alpha",
    type=NumberRange(0, min_open=True),
    default=1.0,
    help="S-LoRA's alpha of --distribution power: 1 = uniform, less = skewed.",
)
@click.option("--num-requests", type=click.IntRange(1), help="[default: 100]")
@click.option("--concurrency", type=click.IntRange(1), help="Closed loop: requests kept running. [default: 16]")
@click.option("--request-rate", type=NumberRange(0, min_open=True), help="Open loop: requests per second.")
@click.option(
    "--cv",
    type=NumberRange(0),
    default=1.0,
    help="Coefficient of variation of the gaps in an open loop: 0 = even, 1 = Poisson, more = bursts.",
)
@click.option("--duration", type=NumberRange(0, min_open=True), help="Seconds of an open loop.")
@click.option(
    "--trace",
    type=click.Choice(["slora"]),
    help="S-LoRA's synthetic traces: power law, 2 requests a second for 300 s, lengths of 8 to 512; other options win.",
)
@click.option(
    "--lengths", type=click.Choice(_values(LengthLaw)), default=LengthLaw.UNIFORM.value, help="Distribution of lengths."
)
@click.option("--prompt-tokens", type=click.IntRange(1), help="Mean prompt length. [default: 128, sharegpt 161]")
@click.option("--prompt-spread", type=click.IntRange(0), default=0, help=SPREAD_HELP)
@click.option("--output-tokens", type=click.IntRange(1), help="Mean output length. [default: 64, sharegpt 338]")
@click.option("--output-spread", type=click.IntRange(0), default=0, help=SPREAD_HELP)
@click.option("--prefixes", type=click.IntRange(0), default=0, help="Shared prefixes of each model.")
@click.option(
    "--prefix-tokens",
    type=click.IntRange(1),
    default=1024,
    help="Length of a shared prefix, which the prompt follows.",
)
@click.option("--text", is_flag=True, help="Prompts of words, about one per token, instead of token ids.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions; implies --text.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Generate exactly the output length.")
@click.option("--temperature", type=NumberRange(0), default=0.0)
@click.option(
    "--cold", is_flag=True, help="Warm up with the base model only; report each adapter's first use separately."
)
@click.option("--warm-up", type=click.IntRange(0), help="Requests before measuring. [default: one per model]")
@click.option(
    "--seed",
    type=int,
    help="Seed of adapters, lengths, prompts and times. [default: a new one in every run, because the server may have"
    " cached an earlier run's prompts]",
)
@click.option(
    "--requests",
    "requests_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines of model, prompt_token_ids and num_output_tokens to send, in place of drawn requests.",
)
@click.option("--json", "json_file", type=NEW_FILE, callback=_in_a_folder, help="Write the report here.")
@click.option(
    "--plot", "plot_file", type=NEW_FILE, callback=_in_a_folder, help="Write an SVG of TTFT, ITL and adapters here."
)
@click.pass_context
def bench(context: click.Context, trace: str | None, **options: Any) -> None:
    """Measure a running server, ours or another with OpenAI's API: TTFT, inter-token latency and throughput, per
    adapter and in total.

    Keeps --concurrency requests running, or sends --request-rate requests per second however fast the server answers.
    Token counts are the server's. Exits with 1 if a request failed or returned a different number of tokens than
    requested. Ctrl-C stops the run and reports the requests that have finished.
    """
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if options["requests_file"] and (needless := [name for name in REPLACED_BY_REQUESTS if name in given]):
        raise click.UsageError(f"--requests defines what is sent: leave out --{needless[0].replace('_', '-')}")
    if trace:
        # --num-requests replaces the trace's duration.
        own = given | ({"duration"} if "num_requests" in given else set())
        options |= {name: value for name, value in SLORA_TRACE.items() if name not in own}
    _check(options)
    if options["seed"] is None:
        options["seed"] = randrange(MAX_SEED)
    settings = BenchSettings(**options)
    from loraserve.cli.loadtest.session import run_session

    sys.exit(run_session(settings))


def _check(options: dict[str, Any]) -> None:
    if options["concurrency"] and options["request_rate"]:
        raise click.UsageError("--concurrency makes a closed loop, --request-rate an open one: choose one")
    if options["duration"] and not options["request_rate"]:
        raise click.UsageError("--duration needs an open loop: add --request-rate")
    if options["duration"] and options["num_requests"]:
        raise click.UsageError("--duration and --request-rate set the number of requests: leave out --num-requests")
    if options["requests_file"] and (options["text"] or options["chat"]):
        raise click.UsageError("--requests contains token ids, which --text and --chat exclude")
    for name in ("prompt", "output"):
        mean, spread = options[f"{name}_tokens"], options[f"{name}_spread"]
        if spread and options["lengths"] == LengthLaw.SHAREGPT:
            raise click.UsageError(f"--{name}-spread: --lengths sharegpt has its own spread")
        if options["lengths"] == LengthLaw.UNIFORM and mean and spread >= mean:
            raise click.UsageError(f"--{name}-spread {spread} must be below --{name}-tokens {mean}")
