"""Flags of `vllm serve` that we do not have: named, so that they are refused with a reason and not with a riddle."""

UNSUPPORTED_FLAGS = {
    "--cpu-offload-gb": "weights stay on one device",
    "--swap-space": "preempted requests are recomputed, nothing is swapped",
    "--tensor-parallel-size": "one engine runs on one device",
    "--pipeline-parallel-size": "one engine runs on one device",
    "--data-parallel-size": "run several servers behind a load balancer",
    "--trust-remote-code": "code that comes with a model is never run",
    "--max-cpu-loras": "set --adapter-memory-bytes, and on a GPU --adapter-host-memory-bytes",
    "--lora-dtype": "adapters are served in the model's dtype (--dtype)",
    "--enable-lora-bias": "adapters with lora_bias are always taken",
    "--long-lora-scaling-factors": "an adapter does not change how long a context may be",
    "--lora-extra-vocab-size": "adapters with new tokens are refused by name",
    "--fully-sharded-loras": "one engine runs on one device",
    "--lora-target-modules": "an adapter's targets are its own; every linear can be adapted",
    "--specialize-active-lora": "on a GPU one graph serves any number of adapters",
    "--enable-mixed-moe-lora-format": "adapters of experts are taken in either form, side by side",
    "--enable-moe-shared-loras": "adapters with weights that experts share are not supported",
    "--max-lora-cls-labels": "classifiers have as many as their heads, up to 4,096",
    "--enable-tower-connector-lora": "models read text only",
    "--default-mm-loras": "models read text only",
    "--hf-overrides": "edit the model's config.json",
    "--speculative-config": "--num-speculative-tokens drafts from a request's text, as method ngram; no draft models",
    "--enable-chunked-prefill": "long prompts are always cut to the token budget (--max-num-batched-tokens)",
    "--no-enable-chunked-prefill": "long prompts are always cut to the token budget (--max-num-batched-tokens)",
    "--scheduling-policy": "requests are scheduled fairly between tenants",
    "--exclude-tools-when-tool-choice-none": "the model never sees tools that it may not call",
    "--tool-parser-plugin": "--tool-call-parser names the parsers there are",
    "--structured-outputs-config": "llguidance holds answers to every schema and grammar",
    "--guided-decoding-backend": "llguidance holds answers to every schema and grammar",
    "--trust-request-chat-template": "requests bring no template; see --chat-template and --adapter-chat-templates",
    "--default-chat-template-kwargs": "requests send chat_template_kwargs; or change the template (--chat-template)",
    "--reasoning-parser-plugin": "--reasoning-parser names the parsers there are",
    "--ssl-keyfile": "put a TLS proxy in front",
    "--ssl-certfile": "put a TLS proxy in front",
    "--root-path": "strip the prefix in the proxy",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "statistics are not logged; read /metrics",
    "--collect-detailed-traces": "spans always have queue, prefill and decode (--otlp-traces-endpoint)",
    "--api-server-count": "one API process serves one engine",
}

OFF_BY_DEFAULT = frozenset(
    {
        "--trust-remote-code",
        "--enable-lora-bias",
        "--fully-sharded-loras",
        "--specialize-active-lora",
        "--enable-mixed-moe-lora-format",
        "--enable-moe-shared-loras",
        "--enable-tower-connector-lora",
        "--exclude-tools-when-tool-choice-none",
        "--trust-request-chat-template",
    }
)
"""Of these, what vLLM has as --no-…, too, and does not do unless it is told to."""

SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}

_LORA_DTYPE = "--lora-dtype"
_ASKS_FOR_NOTHING = {f"{_LORA_DTYPE}=auto", *(flag.replace("--", "--no-", 1) for flag in OFF_BY_DEFAULT)}


def without_what_asks_for_nothing(args: list[str]) -> list[str]:
    """Without `--lora-dtype auto` and `--no-trust-remote-code` and the like: vLLM's defaults and what we do."""
    kept: list[str] = []
    for token in args:
        if token == "auto" and kept and _dashed(kept[-1]) == _LORA_DTYPE:
            kept.pop()
        elif _dashed(token) not in _ASKS_FOR_NOTHING:
            kept.append(token)
    return kept


def _dashed(token: str) -> str:
    return token.replace("_", "-")


def refusal(token: str) -> str | None:
    """Why the flag at the start of `token` is not supported; None if it is no such flag."""
    flag = token.partition("=")[0]
    flag = SHORT_FLAGS.get(flag, flag).replace("_", "-")
    reason = UNSUPPORTED_FLAGS.get(flag)
    return None if reason is None else f"{flag} is a flag of vLLM that loraserve does not have: {reason}."
