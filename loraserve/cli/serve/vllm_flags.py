"""Flags of `vllm serve` that we do not have, so that they are refused with a reason."""

UNSUPPORTED_FLAGS = {
    "--cpu-offload-gb": "weights stay on one device",
    "--swap-space": "preempted requests are recomputed, nothing is swapped",
    "--tensor-parallel-size": "one engine runs on one device",
    "--pipeline-parallel-size": "one engine runs on one device",
    "--data-parallel-size": "run several servers behind a load balancer",
    "--trust-remote-code": "code that comes with a model is never run",
    "--max-cpu-loras": "set --adapter-memory-bytes, and on a GPU --adapter-host-memory-bytes",
    "--lora-dtype": "adapters are served in the model's dtype (--dtype)",
    "--enable-lora-bias": "adapters with lora_bias are always accepted",
    "--long-lora-scaling-factors": "adapters do not change the context length",
    "--lora-extra-vocab-size": "adapters cannot add tokens; the base model must have rows for them",
    "--fully-sharded-loras": "one engine runs on one device",
    "--lora-target-modules": "each adapter has its own targets; every linear layer can be one",
    "--specialize-active-lora": "on a GPU one graph serves any number of adapters",
    "--enable-mixed-moe-lora-format": "adapters for experts are accepted in both formats, also mixed",
    "--enable-moe-shared-loras": "adapters with weights shared by experts are not supported",
    "--max-lora-cls-labels": "a classifier has as many labels as its head, up to 4,096",
    "--enable-tower-connector-lora": "models read text only",
    "--default-mm-loras": "models read text only",
    "--hf-overrides": "edit the model's config.json",
    "--speculative-config": "use --num-speculative-tokens, which drafts from the request's text; no draft models",
    "--enable-chunked-prefill": "long prompts are always computed in chunks (--max-num-batched-tokens)",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks (--max-num-batched-tokens)",
    "--scheduling-policy": "requests are scheduled fairly between tenants, and those of one tenant by their `priority`",
    "--exclude-tools-when-tool-choice-none": "the model never sees tools that it may not call",
    "--tool-parser-plugin": "--tool-call-parser lists the available parsers",
    "--structured-outputs-config": "llguidance enforces all schemas and grammars",
    "--guided-decoding-backend": "llguidance enforces all schemas and grammars",
    "--trust-request-chat-template": "requests have no template; use --chat-template or --adapter-chat-templates",
    "--default-chat-template-kwargs": "send chat_template_kwargs in requests, or change the template (--chat-template)",
    "--reasoning-parser-plugin": "--reasoning-parser lists the available parsers",
    "--ssl-keyfile": "put a TLS proxy in front",
    "--ssl-certfile": "put a TLS proxy in front",
    "--root-path": "strip the prefix in the proxy",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "statistics are not logged; read /metrics",
    "--collect-detailed-traces": "spans always include queue, prefill and decode (--otlp-traces-endpoint)",
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
"""Those of these flags that vLLM also has as --no-…, and that are off by default in vLLM."""

SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}

_LORA_DTYPE = "--lora-dtype"
_NOOP_FLAGS = {f"{_LORA_DTYPE}=auto", *(flag.replace("--", "--no-", 1) for flag in OFF_BY_DEFAULT)}


def drop_noop_flags(args: list[str]) -> list[str]:
    """Drops `--lora-dtype auto`, `--no-trust-remote-code` and the like: they are vLLM's defaults and our behavior."""
    kept: list[str] = []
    for token in args:
        if token == "auto" and kept and _dashed(kept[-1]) == _LORA_DTYPE:
            kept.pop()
        elif _dashed(token) not in _NOOP_FLAGS:
            kept.append(token)
    return kept


def _dashed(token: str) -> str:
    return token.replace("_", "-")


def refusal(token: str) -> str | None:
    """Why the flag at the start of `token` is not supported; None if it is not one of these flags."""
    flag = token.partition("=")[0]
    flag = SHORT_FLAGS.get(flag, flag).replace("_", "-")
    reason = UNSUPPORTED_FLAGS.get(flag)
    return None if reason is None else f"{flag} is a flag of vLLM that loraserve does not have: {reason}."
