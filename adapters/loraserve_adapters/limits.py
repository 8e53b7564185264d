"""Limits above which an adapter is refused."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    max_config_bytes: int = 256 * 1024
    max_json_nesting: int = 32
    max_header_bytes: int = 16 * 1024 * 1024
    max_tensors: int = 65_536
    """Adapters from before transformers 5 have A and B for each linear of each expert: 36,864 tensors for a
    Qwen3-30B-A3B."""
    max_weights_bytes: int = 4 * 1024**3
    max_lora_rank: int = 512
    max_pattern_length: int = 512
    max_invocation_tokens: int = 64
    max_trained_tokens: int = 128
    """Per table; in the packed form each takes as many values as the table has rows."""
    max_own_tables: int = 8
    """Names in `modules_to_save`; a model has two tables, but PEFT may list each under several."""
    max_labels: int = 4096
    """Labels of a classifier."""
    max_label_bytes: int = 256
    """UTF-8 bytes of one label's name; the answer to each input has one."""
    max_labels_bytes: int = 8 * 1024
    """Bytes of all label names together; every revision of the adapter's document has them."""
    max_score_template_bytes: int = 4 * 1024
    """UTF-8 bytes of a reranker's `score_template`; every revision has it, too."""
    max_patterns: int = 2048
    """Entries of `rank_pattern` and `alpha_pattern` together."""
    max_pattern_steps: int = 2_000_000
    """Work allowed for all of one adapter's patterns on all module names; about a second or two."""
    follow_symlinks: bool = False
    """Follow links wherever they lead. Only for folders named by the operator, such as Hugging Face cache snapshots, or
    by someone who may name any folder; never for a tenant's."""
    link_roots: tuple[str, ...] = ()
    """Otherwise links are followed only to files below these folders, whose own paths have no links; see `files`."""


DEFAULT_LIMITS = AdapterLimits()
