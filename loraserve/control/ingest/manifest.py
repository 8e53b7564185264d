"""What validation found out about content. Stored with it, so that a tenant's files are not evaluated again."""

import msgspec

from loraserve.control.ingest.report import Report
from loraserve.store.records import ClassifierRecord

MANIFEST_FORMAT = 1


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    """As in the file, such as "BF16"."""
    shape: list[int]
    sha256: str
    """Hex, over its bytes as in the file."""


class ModuleRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """As in `model.named_modules()` of transformers."""
    lora_rank: int
    scaling: float


class _CanonicalConfig(msgspec.Struct, frozen=True):
    invocation_token_ids: list[int] = []
    labels: list[str] = []
    problem_type: str | None = None
    score_template: str | None = None
    chat_template: str | None = None
    trained_tokens: list[tuple[str, list[int]]] = []
    use_dora: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = MANIFEST_FORMAT
    digest: str
    config: msgspec.Raw
    """The canonical config: the fields that decide the computation, with defaults filled in."""
    tensors: list[TensorRecord]
    """Sorted by name."""
    modules: list[ModuleRecord]
    """The linears that the adapter changes, in the base's order."""
    base_fingerprint: str
    """The base model that the content was validated against."""
    base_dtype: str
    lora_ranks: list[int]
    """Distinct ranks, ascending."""
    lora_alpha: float
    use_rslora: bool
    target_modules: list[str]
    """Kinds of modules, such as "q_proj", sorted."""
    dtypes: list[str]
    num_parameters: int
    num_labels: int = 0
    """Of a classifier; 0 = not a classifier."""
    own_tables: list[str] = []
    """Names of the tables, embedding or `lm_head`, that it has in place of the base's, in the base's order."""
    packed_file: str
    """File name of its packed form for that base."""
    packed_bytes: int
    """Size of the packed form, and thus in the engine's arena."""
    report: Report

    @property
    def invocation_token_ids(self) -> list[int]:
        """Of an activated LoRA; empty = not activated."""
        return msgspec.json.decode(self.config, type=_CanonicalConfig).invocation_token_ids

    @property
    def chat_template(self) -> str | None:
        """See `AdapterConfig`."""
        return msgspec.json.decode(self.config, type=_CanonicalConfig).chat_template

    @property
    def trained_token_ids(self) -> list[int]:
        """Of all tables, ascending."""
        tables = msgspec.json.decode(self.config, type=_CanonicalConfig).trained_tokens
        return sorted({token_id for _, token_ids in tables for token_id in token_ids})

    @property
    def use_dora(self) -> bool:
        return msgspec.json.decode(self.config, type=_CanonicalConfig).use_dora

    @property
    def classifier(self) -> ClassifierRecord | None:
        """None = not a classifier."""
        if self.num_labels == 0:
            return None
        config = msgspec.json.decode(self.config, type=_CanonicalConfig)
        return ClassifierRecord(
            num_labels=self.num_labels,
            labels=config.labels,
            problem_type=config.problem_type,
            score_template=config.score_template,
        )

    @property
    def max_lora_rank(self) -> int:
        return max(self.lora_ranks)
