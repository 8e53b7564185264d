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
    """A request and its choices. The first choice computes the prompt; the others are then forked from it."""

    request: EngineRequest
    arrival_s: float
    root_hash: BlockHash
    adapter_start: int = 0
    """Prompt tokens before this position are computed with the base model alone; above 0 only for an activated LoRA."""
    sequences: list["Sequence"] = field(default_factory=list)
    unfinished: set[int] = field(init=False)
    """Indexes of the choices without a finish reason, forked or not."""
    wants_prompt_logprobs: bool = field(init=False)
    is_forked: bool = False
    is_begun: bool = False
    """It has been scheduled at least once, so computing its prompt has begun."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    hidden_sum: Tensor | None = None
    """float32 [hidden_size]: sum over the rows computed so far, for mean pooling."""
    num_bypassed: int = 0
    """How often a later request was admitted before this one because this one's adapter did not fit."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.request.sampling.n))
        self.wants_prompt_logprobs = self.request.sampling.prompt_logprobs is not None

    @property
    def wants_mean(self) -> bool:
        """Whether the answer is the mean of the hidden states of the whole prompt."""
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
    """Hashes of the full blocks of `token_ids`, as far as they have been computed."""
    state_slot: int = -1
    """Where the recurrent state after its computed tokens is; -1 = not running, or the model has none."""
    states_to_save: list[tuple[int, int]] = field(default_factory=list)
    """(Number of blocks, slot) of states that steps save and nobody can find yet."""
    num_shared_tokens: int = 0
    """Where a state should be saved, because an earlier sequence with the same tokens up to there continued
    differently; 0 = nowhere."""
    last_output_block: BlockHash | None = None
    """The block of its output after which a state is saved, if one is."""
    num_charged_tokens: int = 0
    """Tokens already charged to the tenant; recompute is free of charge, unless it gave way to a more urgent one."""
    num_remembered_blocks: int = 0
    """Full, computed blocks already offered to the prefix cache."""
    status: Status = Status.WAITING
    adapter_slot: int = -1
    """Row of the adapter table while running; -1 = base model."""
    is_first_output_sent: bool = False
    admitted: int = 0
    """Order of admission; the newest is preempted first."""
    num_admitted_tokens: int = 0
    """How many tokens it had when it was admitted last."""
    matcher: OutputMatcher | None = None
    """Follows the output; None if the request has neither a grammar nor a limit of its reasoning."""
    sampling_row: SamplingRow | None = None
    """Reused in every step."""
    draft: Draft | None = None
    """None until drafting is first tried."""
    num_predicted_tokens: int = 0
    """Drafted tokens that came from the request's prediction."""
    num_accepted_tokens: int = 0
    """Of these, the ones that were accepted."""
    request: EngineRequest = field(init=False)
    is_pooled: bool = field(init=False)
    """The sequence ends with its prompt; no token is sampled."""

    def __post_init__(self) -> None:
        self.request = self.state.request
        self.is_pooled = self.request.pooling is not None

    @property
    def num_seats(self) -> int:
        """Seats that it takes: until its request is forked, one for each unfinished choice."""
        return 1 if self.state.is_forked else len(self.state.unfinished)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True until the prompt has been computed once with all its logits."""
        state = self.state
        return state.wants_prompt_logprobs and self.index == 0 and not state.has_all_prompt_logprobs

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
        """The sampler's input for choosing the token at `position`. Always the same object, updated in place."""
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
