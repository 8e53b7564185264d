"""The engine's state of a request and of each of its choices."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from loraserve.engine.grammars.matcher import OutputMatcher
from loraserve.engine.kv.blocks import BlockHash
from loraserve.engine.request import EngineRequest, Pooling, TokenLogprob
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.scheduling.draft import Draft


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and its choices. The first one computes the prompt; then the others are forked from it."""

    request: EngineRequest
    arrival_s: float
    root_hash: BlockHash
    adapter_start: int = 0
    """Prompt tokens before it are computed with the base model alone; above 0 only for an activated LoRA."""
    sequences: list["Sequence"] = field(default_factory=list)
    unfinished: set[int] = field(init=False)
    """Indexes of the choices without a finish reason, forked or not."""
    wants_prompt_logprobs: bool = field(init=False)
    is_forked: bool = False
    is_begun: bool = False
    """It was scheduled, and so a part of its prompt computed."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    hidden_sum: Tensor | None = None
    """float32 [hidden_size]: of the rows computed so far, where their mean is wanted."""
    num_bypassed: int = 0
    """How often a later request was admitted before this one because this one's adapter did not fit."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.request.sampling.n))
        self.wants_prompt_logprobs = self.request.sampling.prompt_logprobs is not None

    @property
    def wants_mean(self) -> bool:
        """Of the hidden states of all of its prompt."""
        pooling = self.request.pooling
        return pooling is not None and pooling.pooling is Pooling.MEAN

    @property
    def has_all_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.request.prompt_token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens and the KV blocks that hold them."""

    state: RequestState
    index: int
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the blocks."""
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of `token_ids`, as far as they have been hashed."""
    num_charged_tokens: int = 0
    """Tokens already charged to the tenant; recompute after preemption is free of charge."""
    num_remembered_blocks: int = 0
    """Full, computed blocks already offered to the prefix cache."""
    status: Status = Status.WAITING
    adapter_slot: int = -1
    """Row of the adapter table while running; -1 = base model."""
    is_first_output_sent: bool = False
    admitted: int = 0
    """Order of admission; the newest is preempted first."""
    matcher: OutputMatcher | None = None
    """Of the output, where the request has a grammar."""
    sampling_row: SamplingRow | None = None
    """Kept here between steps."""
    draft: Draft | None = None
    """Once it was given one."""
    num_predicted_tokens: int = 0
    """That were drafted of it because its request predicts them."""
    num_accepted_tokens: int = 0
    """Of these, the ones that it then said."""
    request: EngineRequest = field(init=False)
    is_pooled: bool = field(init=False)
    """It ends with its prompt, and no token is sampled."""

    def __post_init__(self) -> None:
        self.request = self.state.request
        self.is_pooled = self.request.pooling is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def row_to_sample(self, position: int, eos_token_ids: tuple[int, ...]) -> SamplingRow:
        """What the sampler must know to choose the token at `position`. One object, whose values move on."""
        row = self.sampling_row
        if row is None:
            params, prompt = self.request.sampling, self.request.prompt_token_ids
            row = self.sampling_row = SamplingRow(
                params=params,
                seed=params.seed + self.index,
                position=position,
                prompt_token_ids=prompt,
                output_token_ids=(),
                eos_token_ids=eos_token_ids,
            )
        row.position = position
        row.num_unknown_tokens = position - len(self.token_ids)
        if row.needs_outputs:
            row.output_token_ids = self.token_ids[self.num_prompt_tokens :]
        return row
