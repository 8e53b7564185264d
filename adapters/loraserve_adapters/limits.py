"""What an adapter may cost us before we refuse it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_config_bytes: int = 256 * 1024
    max_json_nesting: int = 32
    max_header_bytes: int = 16 * 1024 * 1024
    max_tensors: int = 65_536
    """A and B of each linear of each expert, as adapters from before transformers 5 have them, are 36,864 for a
    Qwen3-30B-A3B."""
    max_weights_bytes: int = 4 * 1024**3
    max_lora_rank: int = 512
    max_pattern_length: int = 512
    max_invocation_tokens: int = 64
    max_trained_tokens: int = 128
    """Of a table: in the packed form each takes as many values as the table has rows."""
    max_labels: int = 4096
    """Of a classifier."""
    max_label_bytes: int = 256
    """Of the name of one, in UTF-8: each input's answer has one."""
    max_labels_bytes: int = 8 * 1024
    """Of all of their names: they are in every revision of the adapter's document."""
    max_score_template_bytes: int = 4 * 1024
    """Of the text that a reranker is asked with, in UTF-8: it is in every revision, too."""
    max_patterns: int = 2048
    """Entries of `rank_pattern` and `alpha_pattern` together."""
    max_pattern_steps: int = 2_000_000
    """Work allowed for all of one adapter's patterns on all module names; about a second or two."""
    follow_symlinks: bool = False
    """Wherever they lead: only for folders that the operator names, such as Hugging Face cache snapshots, or somebody
    who may name any folder; never for a tenant's."""
    link_roots: tuple[str, ...] = ()
    """Else links are followed to files below these folders, given without links; see `files`."""


DEFAULT_LIMITS = Limits()
