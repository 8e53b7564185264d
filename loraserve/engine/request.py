"""The engine's requests and outputs. No torch here: the API process imports this module."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineErrorCode(StrEnum):
    """Why a request ended with reason "error"."""

    INVALID_REQUEST = "invalid_request"
    ADAPTER_NOT_LOADED = "adapter_not_loaded"
    ADAPTER_UNREADABLE = "adapter_unreadable"
    """The adapter was loaded, but its packed file could not be copied into the arena."""
    GRAMMAR = "grammar"
    """The grammar cannot be used, or the tokens it allows next cannot be determined within the limits."""
    NOT_FINITE = "not_finite"
    """The model produced values that are not finite numbers."""


class GrammarKind(StrEnum):
    """Names are those of `llguidance.grammar_from`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """Lark or GBNF."""
    LARK = "lark"
    """Lark that the server wrote, with rules for `Grammar.marks`."""


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The tokens that mark the reasoning with which an output may begin: anything up to the closing one."""

    opening_id: int | None
    """The first token of an output that reasons; None = the output is reasoning from its start."""
    closing_id: int
    opens_within: int = 1
    """Tokens of the output among which the opening one may be; more than one for white space before it."""


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    tokens: ReasoningTokens
    max_tokens: int
    """Between the marks, at least 0; then the closing one must follow."""


@dataclass(frozen=True, slots=True)
class GrammarCalls:
    """Tool calls, of which an output may consist instead of what a grammar describes. Anything may follow their
    opening."""

    opening: str
    """The text with which calls begin."""
    opening_id: int | None = None
    """The token that stands for this text; None = there is none."""
    bare_names: tuple[str, ...] = ()
    """Functions whose first call may also be a JSON object, `{"name": …, "parameters": {…}}`, without an opening."""


@dataclass(frozen=True, slots=True)
class GrammarMark:
    """A text for which the model may have a token of its own."""

    text: str
    token_id: int | None = None
    """None = there is none."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output, applied token by token."""

    kind: GrammarKind
    text: str
    reasoning: ReasoningTokens | None = None
    """Reasoning that may precede what the grammar constrains."""
    calls: GrammarCalls | None = None
    """Only with a JSON schema. None = the output is never a call."""
    marks: tuple[GrammarMark, ...] = ()
    """Only with Lark: what its rules call `mark_0`, `mark_1` and so on."""
    param: str | None = field(default=None, compare=False)
    """The request's parameter that specifies it, for error messages; not part of its identity."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked where requests enter (the API) and again by `check_request`."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = 0
    """0 = all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty = all."""
    seed: int = 0
    """Choice i of a request draws from (seed + i, position)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """None = no logprobs; k = the sampled token's and the k most likely tokens'."""
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    """Constrains the output and decides where it ends; None = no constraint."""
    reasoning_limit: ReasoningLimit | None = None
    """None = only `max_tokens` ends the reasoning."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Pooling(StrEnum):
    """How the hidden states of a prompt's tokens become one vector."""

    LAST = "last"
    """The last token's, which depends on all other tokens."""
    MEAN = "mean"


class LabelActivation(StrEnum):
    """What is applied to the numbers from a classifier's head."""

    NONE = "none"
    SIGMOID = "sigmoid"
    """To each number separately."""
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    pooling: Pooling
    dimensions: int | None = None
    """How many leading components of the vector to keep; None = all, the model's hidden size."""
    normalize: bool = True
    """Scale to a Euclidean length of 1, after `dimensions` is applied."""
    labels: LabelActivation | None = None
    """The answer is a number for each label: the output of the head of the request's adapter, a classifier, for the
    vector, which is neither truncated nor normalized. None = the answer is the vector."""


def to_classify(activation: LabelActivation) -> PoolingParams:
    """As transformers' `…ForSequenceClassification`: from the last token's hidden state."""
    return PoolingParams(Pooling.LAST, normalize=False, labels=activation)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt. Its choices (`sampling.n`) share the prompt's KV blocks."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter_digest: str | None = None
    """None = the base model."""
    cache_salt: str = ""
    """Requests share prefix blocks only with requests of the same salt (tenant)."""
    tenant: str = ""
    tenant_weight: float = 1.0
    """Share of the engine relative to other tenants; above 0."""
    priority: int = 0
    """Among the tenant's own requests, lower ones are more urgent."""
    predicted_token_ids: list[int] = field(default_factory=list)
    """An approximate prediction of its outputs. Affects how soon they arrive, not what they are."""
    pooling: PoolingParams | None = None
    """The answer is one vector for the prompt, without tokens; `sampling` has no effect. None = the answer is
    tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    """Natural logarithm of the softmax of the model's own logits: before bias, bans, penalties and temperature, as in
    vLLM's default `raw_logprobs`. -inf if the logit is."""
    rank: int
    """1 + the number of tokens with a larger logit, so 1 = the most likely token; equal logits share a rank."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """A request whose prompt is about to be computed; from now on the prompt counts as usage. Reported once, even if it
    is preempted."""

    request_id: str
    queue_s: float
    """Seconds since it arrived in the engine."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(slots=True)
class SequenceOutput:
    """The new output of one choice of one request in one step.

    Not frozen: one is made for every token, in 0.35 µs instead of 1.6.
    """

    request_id: str
    index: int
    """The choice, 0 to n - 1."""
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """Aligned with `token_ids`."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id of `stop_token_ids` that ended it; None for EOS."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On the first output of index 0; the first prompt token has None."""
    pooled: bytes | None = None
    """The prompt's vector or its labels' numbers as little-endian float32, if the request has `pooling`."""
    num_predicted_tokens: int = 0
    """Tokens drafted so far for this choice from the request's prediction; also 0 in steps without a draft."""
    num_accepted_tokens: int = 0
    """Of these, the ones that were accepted."""
    error: str | None = None
    """With finish_reason "error": what went wrong, safe to show."""
    error_code: EngineErrorCode | None = None
    """With finish_reason "error"."""

    def extend(self, later: "SequenceOutput") -> None:
        """Append the choice's next output of the same step."""
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_token_id = later.finish_reason, later.stop_token_id


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One tenant's work for one adapter."""

    tenant: str
    adapter_digest: str | None
    """None = the base model."""
    num_running: int
    """Sequences."""
    num_waiting: int
    num_tokens_waiting: int
    """Prompt tokens of running and waiting sequences that are not computed yet."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, sent several times a second while it works and once a second while it is idle."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Never used or holding nothing."""
    num_cached_blocks: int = 0
    """Unreferenced, but holding a prefix."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, in total."""
    prefix_cache_hits: int = 0
    """Prompt tokens found, in total."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed, in total."""
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    """Tokens that were drafted and checked, in total."""
    num_accepted_tokens: int = 0
    """Of these, the ones that were accepted."""
    arena_size_bytes: int = 0
    arena_used_bytes: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_adapter_reloads: int = 0
    """Loads of adapters that had been evicted."""
    running_adapters: list[str] = field(default_factory=list)
    """Digests with a running sequence."""
    waiting_adapters: list[str] = field(default_factory=list)
    resident_adapters: list[str] = field(default_factory=list)
    """Least recently used first."""
    resident_extents: list[tuple[int, int]] = field(default_factory=list)
    """(offset, size) in bytes of each resident adapter in the arena."""
    lists_residents: bool = True
    """False: they are not listed, and those of the snapshot before are to be used."""
    queues: list[QueueStats] = field(default_factory=list)
    recent_step_tokens: list[int] = field(default_factory=list)
    """Tokens computed in each step since the previous snapshot."""
