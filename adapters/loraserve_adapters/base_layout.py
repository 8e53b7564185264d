"""What an adapter must fit: the base model's linears, in the order and grouping the engine computes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseModule:
    """A linear of the base model, its token embedding, or a bare weight, which belongs to no linear: that of all
    experts of a layer, or of a router. Named as in transformers before any fusion."""

    name: str
    """As in `model.named_modules()`, e.g. "model.layers.0.self_attn.q_proj", or for a bare weight as in
    `model.named_parameters()`, e.g. "model.layers.0.mlp.experts.down_proj"."""
    in_features: int
    """For the embedding, the number of tokens."""
    out_features: int
    weight_sha256: str | None = None
    """Of the weight's bytes in `BaseLayout.dtype`; given for the embedding and `lm_head`, whose base weights PEFT saves
    with their LoRA."""
    num_matrices: int | None = None
    """Matrices of that shape in a bare weight: one per expert, one for a router. None = a linear or the embedding."""
    expert_linears: tuple[str, ...] = ()
    """The linears of each expert that this weight concatenates: gate_proj and up_proj, up_proj or down_proj. Empty if
    their outputs are interleaved, or if it is not a weight of experts."""
    bias_sha256: str | None = None
    """As `weight_sha256`; given if that is and the linear has a bias."""
    is_embedding: bool = False
    is_tied: bool = False
    """For `lm_head`: PEFT trains it with the embedding, because their weights are one, or the config says so."""
    is_absorbed: bool = False
    """The up-projection of latent attention, applied to queries and not to keys: one adapter for a whole sequence."""

    @property
    def is_linear(self) -> bool:
        return self.num_matrices is None and not self.is_embedding

    @property
    def is_of_vocabulary(self) -> bool:
        """The embedding or `lm_head`, whose weights have a row for each token."""
        return self.weight_sha256 is not None

    @property
    def weight_shape(self) -> tuple[int, int]:
        """[num_embeddings, hidden_size] of the embedding, [out_features, in_features] of a linear."""
        if self.is_embedding:
            return self.in_features, self.out_features
        return self.out_features, self.in_features

    @property
    def is_router(self) -> bool:
        """A bare weight of one matrix, which was a linear of its own before transformers 5."""
        return self.num_matrices == 1 and self.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The base model's linears in groups that share an input, such as q|k|v; the embedding and each bare weight are
    groups of their own. Sent by the engine when it is ready."""

    fingerprint: str
    """sha256 over groups, dtype and the packed format's version: a packed adapter fits iff it matches."""
    dtype: str
    """"float32", "bfloat16" or "float16": of the packed matrices."""
    groups: tuple[tuple[BaseModule, ...], ...]
    other_modules: tuple[str, ...]
    """Names of all modules that are not in a group (norms, layers, …), for target patterns."""
    embedding_modules: tuple[str, ...] = ()
    """Names among `other_modules` of embeddings that cannot have adapters: LoRA on them is refused by name."""
    unreached_linears: tuple[str, ...] = ()
    """Names among `other_modules` of linears that text never reaches, such as those of an image tower: LoRA on them
    changes no answer, and is left out."""
    vocab_size: int | None = None
    """Token ids are below it; None = unknown."""
    hidden_size: int | None = None
    """Size of the states after the last layer, which a classifier's head reads; None = unknown."""
    is_headless: bool = False
    """Excludes what follows the last layer; names are those of the model without its head: see `headless`."""
    is_other_class: bool = False
    """Names are those of the model's other class: see `other_class`."""
    lacks_modules: bool = False
    """That class has further modules beside its text decoder, whose names are unknown."""

    @property
    def shown_as(self) -> str:
        """Its name in messages."""
        if self.is_headless:
            return "the base model without its head"
        if self.is_other_class:
            return f"the base model's {'text decoder' if self.lacks_modules else 'text-only class'}"
        return "the base model"
