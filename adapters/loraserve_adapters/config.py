"""Strict reading of PEFT's `adapter_config.json`: every field is honored, has no effect, or is refused by name.

The fields are those of `LoraConfig` in PEFT 0.21 and earlier. Newer versions write their new fields for every adapter,
so an unknown field whose value requests nothing is only named in a warning. Nothing in the file is ever imported or
evaluated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from loraserve_adapters import config_values as values
from loraserve_adapters.checks import Checks
from loraserve_adapters.config_values import CONFIG_NAME, SEQ_CLS
from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.files import open_regular, read_exactly
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.strict_json import parse_object

ALL_LINEAR = "all-linear"
CAUSAL_LM = "CAUSAL_LM"
FEATURE_EXTRACTION = "FEATURE_EXTRACTION"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the config says about the computation, with PEFT's defaults filled in."""

    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    """Names or dotted suffixes of names; a string is a pattern for the whole name, or `ALL_LINEAR`. Empty only if
    there are `target_parameters`."""
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...]
    """Empty = all layers."""
    layers_pattern: tuple[str, ...]
    """Also empty if all layers are selected, because it has no effect then."""
    rank_pattern: tuple[tuple[str, int], ...]
    """In the file's order: the first pattern that matches a module wins."""
    alpha_pattern: tuple[tuple[str, float], ...]
    lora_bias: bool = False
    """B has a bias, which is scaled like its product."""
    use_dora: bool = False
    """Each output of a targeted linear has a magnitude, to which its weights (the base's plus the product of A and B)
    are scaled."""
    invocation_token_ids: tuple[int, ...] = ()
    """For an activated LoRA, which changes nothing before the last occurrence of these tokens in a prompt. Empty = not
    activated: all tokens are computed with it."""
    trained_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(table, ids) of tokens whose rows of a table, embedding or `lm_head`, are the adapter's own. table: its name or a
    dotted suffix of it; empty, which means the embedding, if the config has only ids."""
    own_tables: tuple[str, ...] = ()
    """Ends of names of tables, embedding or `lm_head`, that are the adapter's own as a whole."""
    ensures_weight_tying: bool = False
    """If the base's `lm_head` is tied to the embedding, LoRA on one is LoRA on the other, and so is an own table."""
    target_parameters: tuple[str, ...] = ()
    """Names or dotted suffixes of names of bare weights; those named are targeted in all layers."""
    is_classifier: bool = False
    """Its tensors include a head, which replaces the base's."""
    labels: tuple[str, ...] = ()
    """Label names of a classifier, in the order of its head's outputs; empty = no names."""
    problem_type: str | None = None
    """One of `PROBLEM_TYPES`: what the outputs of a classifier mean. None = one of its labels is right or, if there
    is only one, it applies or not."""
    score_template: str | None = None
    """For a classifier with one label that ranks documents: its input text, with the placeholders {query} and
    {document}. None = both in sequence, as its tokenizer formats pairs."""
    chat_template: str | None = None
    """The server's name for the template that renders its chats; None = the base model's template."""
    base_model_name: str | None = None
    """As the author wrote it; never trusted, never opened."""
    task_type: str | None = field(default=None, compare=False)
    """Not part of the computation; decides whether tensors may have the names that `headless` describes."""


def read_config(folder: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> AdapterConfig:
    """The folder's `adapter_config.json`. Raises only `AdapterError`; reads at most `limits.max_config_bytes`."""
    return parse_config(read_config_bytes(folder, limits), limits)


def read_config_bytes(folder: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> bytes:
    """Raises only `AdapterError`."""
    with open_regular(folder, CONFIG_NAME, limits) as (descriptor, size):
        _check_size(size, limits)
        data = bytearray(size)
        read_exactly(descriptor, memoryview(data), 0, CONFIG_NAME)
    return bytes(data)


def parse_config(data: bytes, limits: AdapterLimits = DEFAULT_LIMITS) -> AdapterConfig:
    """Raises only `AdapterError`, for the first problem."""
    checks = Checks()
    config = check_config(data, limits, checks)
    checks.raise_first()
    assert config is not None
    return config


def check_config(data: bytes, limits: AdapterLimits, checks: Checks) -> AdapterConfig | None:
    """Records every field that is not accepted; None if one of them decides the computation."""
    fields = checks.attempt("config.json", lambda: _parse(data, limits))
    if fields is None:
        return None
    checks.passed("config.json", f"{CONFIG_NAME} is plain JSON without duplicate keys")
    if "peft_type" not in fields:
        # First, because it explains the unknown fields of other libraries' configs, such as MLX's.
        reason, remedy = 'missing, expected "LORA": not the config of a PEFT adapter', "Convert it to PEFT's format."
        checks.fail("config.options", values.refused("unsupported_option", reason, "peft_type", remedy=remedy))
    for name, value in fields.items():
        checks.attempt("config.options", lambda name=name, value=value: _check_option(name, value))
    ignored = [name for name, value in fields.items() if _is_ignored(name, value)]
    if ignored:
        checks.warn("config.options", _ignored(ignored))
    if warning := _own_class(fields.get("auto_mapping")):
        checks.warn("config.class", warning)
    if not checks.failed("config.options"):
        how_many = f"the other {len(fields) - len(ignored)}" if ignored else f"all {len(fields)}"
        checks.passed("config.options", f"{how_many} fields are supported")
    config = _build(fields, limits, checks)
    if config is not None:
        activated = f", activated by the tokens {list(config.invocation_token_ids)}"
        shown_values = f"rank {config.lora_rank}, alpha {config.lora_alpha:g}" + (", DoRA" if config.use_dora else "")
        shown_values += activated if config.invocation_token_ids else ""
        num_tokens = len({token_id for _, ids in config.trained_tokens for token_id in ids})
        shown_values += f", {num_tokens} trained token{'s' * (num_tokens > 1)}" if num_tokens else ""
        shown_values += f", own {shown_name(', '.join(config.own_tables))}" if config.own_tables else ""
        shown_values += f", chats use the server's template {config.chat_template}" if config.chat_template else ""
        checks.passed("config.values", shown_values)
    return config


def _parse(data: bytes, limits: AdapterLimits) -> dict[str, Any]:
    _check_size(len(data), limits)
    return parse_object(data, file=CONFIG_NAME, code="bad_json", max_nesting=limits.max_json_nesting)


def _check_size(size: int, limits: AdapterLimits) -> None:
    if size > limits.max_config_bytes:
        raise values.refused(
            "too_large",
            f"{size} bytes; at most {limits.max_config_bytes} are accepted",
            found=f"{size} bytes",
            expected=f"at most {limits.max_config_bytes}",
        )


def _check_option(name: str, value: Any) -> None:
    """Refuses options other than plain LoRA, and unknown ones. `_build` checks the values of honored fields."""
    if name == "peft_type":
        if value != "LORA":
            raise values.unsupported(name, value, "LORA", "other kinds of adapters are not supported")
    elif name == "init_lora_weights":
        _check_init(value)
    elif name in _HONOURED:
        return
    elif name in _WITHOUT_EFFECT:
        values.check_type(name, value, _WITHOUT_EFFECT[name])
    elif name in _NEUTRAL:
        neutral, why = _NEUTRAL[name]
        if not any(_same(value, accepted) for accepted in neutral):
            raise values.unsupported(name, value, neutral[0], why)
    elif not _is_ignored(name, value):
        raise values.refused("unknown_field", "is not a field of PEFT's LoraConfig known to loraserve", name)


def _is_ignored(name: str, value: Any) -> bool:
    """Whether a field is unknown and its value requests nothing."""
    is_known = name in _HONOURED or name in _WITHOUT_EFFECT or name in _NEUTRAL
    return not is_known and any(_same(value, nothing) for nothing in _NOTHING)


def _ignored(names: list[str]) -> AdapterError:
    listed = ", ".join(names)
    reason = "not known to loraserve and ignored, because null, false, {} and [] request nothing"
    message = f"{CONFIG_NAME}: {shown_name(listed)}: {reason}"
    return AdapterError("ignored_field", message, file=CONFIG_NAME, key=listed)


def _own_class(auto_mapping: Any) -> AdapterError | None:
    """A warning for an adapter trained on a class from outside transformers, which may compute differently."""
    library = auto_mapping.get("parent_library") if isinstance(auto_mapping, dict) else None
    if not isinstance(library, str) or library.partition(".")[0] == "transformers":
        return None
    message = (
        f"{CONFIG_NAME}: auto_mapping: trained on a class from {shown(library)}, but the server uses transformers' own"
    )
    return AdapterError("other_class", message, file=CONFIG_NAME, key="auto_mapping", found=shown(library))


def _build(fields: dict[str, Any], limits: AdapterLimits, checks: Checks) -> AdapterConfig | None:
    """None if a value is refused; all refusals are recorded."""

    def value(name: str, parse: Callable[[str, Any], T], refused: T, default: Any = None) -> T:
        """Returns `refused` in place of a refused value, so that the others are still checked."""
        parsed = checks.attempt("config.values", lambda: parse(name, fields.get(name, default)))
        return refused if parsed is None else parsed

    parameters = value("target_parameters", values.parameters_of(limits), ())
    targets = value("target_modules", values.targets_of(limits, may_be_empty=bool(parameters)), ())
    ranks = value("rank_pattern", values.table_of(limits, values.rank_of(limits)), ())
    alphas = value("alpha_pattern", values.table_of(limits, values.alpha), ())
    layers = value("layers_to_transform", values.layers, ())
    layers_pattern = value("layers_pattern", values.layers_pattern_of(limits), ())
    base_model_name, task_type = fields.get("base_model_name_or_path"), fields.get("task_type")
    saved = value("modules_to_save", values.saved_modules_of(limits, task_type), values.SavedModules(False, ()))
    is_all_linear = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    config = AdapterConfig(
        lora_rank=value("r", values.rank_of(limits), 1, default=8),
        lora_alpha=value("lora_alpha", values.alpha, 1.0, default=8),
        use_rslora=value("use_rslora", values.flag, False),
        target_modules=ALL_LINEAR if is_all_linear else targets,
        exclude_modules=value("exclude_modules", lambda name, found: values.names(name, found or [], limits), ()),
        layers_to_transform=layers,
        layers_pattern=layers_pattern if layers else (),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        lora_bias=value("lora_bias", values.flag, False),
        use_dora=value("use_dora", values.flag, False),
        invocation_token_ids=value("alora_invocation_tokens", values.invocation_of(limits), ()),
        trained_tokens=value("trainable_token_indices", values.trained_tokens_of(limits), ()),
        own_tables=saved.tables,
        ensures_weight_tying=value("ensure_weight_tying", values.flag, False),
        target_parameters=parameters,
        is_classifier=saved.has_head,
        labels=value("id2label", values.labels_of(limits), ()),
        problem_type=value("problem_type", values.problem_type, None),
        score_template=value("score_template", values.score_template_of(limits), None),
        chat_template=value("chat_template", values.chat_template, None),
        base_model_name=base_model_name if isinstance(base_model_name, str) else None,
        task_type=task_type if isinstance(task_type, str) else None,
    )
    checks.attempt("config.values", lambda: _check_layer_selection(fields, targets))
    checks.attempt("config.values", lambda: _check_parameters(config))
    checks.attempt("config.values", lambda: _check_invocation(config))
    checks.attempt("config.values", lambda: _check_dora(config))
    checks.attempt("config.values", lambda: _check_labels(config, fields.get("label2id")))
    checks.attempt("config.values", lambda: _check_has_chats(config))
    checks.attempt("config.values", lambda: _check_num_patterns(len(ranks) + len(alphas), limits))
    return None if checks.failed("config.values") else config


def _check_layer_selection(fields: dict[str, Any], targets: tuple[str, ...] | str) -> None:
    if isinstance(targets, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if fields.get(name) is not None:
                raise values.refused("invalid_field", "cannot be combined with target_modules given as a string", name)
    elif fields.get("layers_pattern") and fields.get("layers_to_transform") is None:
        raise values.refused("invalid_field", "requires layers_to_transform", "layers_pattern")


def _check_parameters(config: AdapterConfig) -> None:
    if config.target_parameters and config.lora_bias:
        raise values.refused("invalid_field", "cannot be combined with lora_bias, as in PEFT", "target_parameters")


def _check_invocation(config: AdapterConfig) -> None:
    """Refuses combinations with which PEFT would compute all tokens with the adapter, or none."""
    name = "alora_invocation_tokens"
    if config.invocation_token_ids and config.target_parameters:
        raise values.refused("invalid_field", "cannot be combined with target_parameters", name)
    if config.invocation_token_ids and config.trained_tokens:
        reason = "cannot be combined with trainable_token_indices, which PEFT also applies before the invocation"
        raise values.refused("invalid_field", reason, name)
    if config.invocation_token_ids and config.own_tables:
        listed = shown_name(", ".join(config.own_tables))
        reason = f"cannot be combined with modules_to_save ({listed}), which PEFT also applies before the invocation"
        raise values.refused("invalid_field", reason, name)
    if config.invocation_token_ids and config.task_type not in (None, CAUSAL_LM):
        reason = f"requires a task_type of {CAUSAL_LM}, found {shown(config.task_type)}"
        raise values.refused("invalid_field", reason, name, found=shown(config.task_type), expected=CAUSAL_LM)


def _check_dora(config: AdapterConfig) -> None:
    others = {
        "lora_bias": config.lora_bias,
        "alora_invocation_tokens": config.invocation_token_ids,
        "target_parameters": config.target_parameters,
    }
    for name, value in others.items():
        if config.use_dora and value:
            raise values.refused("invalid_field", f"cannot be combined with {name}, as in PEFT", "use_dora")


def _check_labels(config: AdapterConfig, label2id: Any) -> None:
    fields = {"id2label": config.labels, "problem_type": config.problem_type, "score_template": config.score_template}
    for name, value in fields.items():
        if value and not config.is_classifier:
            raise values.refused("invalid_field", f"requires a task_type of {SEQ_CLS}", name)
    if label2id and label2id != {label: number for number, label in enumerate(config.labels)}:
        raise values.invalid("label2id", label2id, "null or the inverse of id2label")


def _check_has_chats(config: AdapterConfig) -> None:
    if config.chat_template and (config.is_classifier or config.task_type == FEATURE_EXTRACTION):
        reason = f"cannot be used with a task_type of {shown(config.task_type)}, which does not answer chats"
        raise values.refused("invalid_field", reason, "chat_template")


def _check_num_patterns(count: int, limits: AdapterLimits) -> None:
    if count > limits.max_patterns:
        raise values.refused("too_large", f"more than {limits.max_patterns} patterns", "rank_pattern")


_HONOURED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "lora_bias",
        "use_dora",
        "alora_invocation_tokens",
        "trainable_token_indices",
        "ensure_weight_tying",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "modules_to_save",
        # Not PEFT's, which ignores them: the template of chats; names and meaning of a classifier's labels, and a
        # reranker's template.
        "chat_template",
        "id2label",
        "label2id",
        "problem_type",
        "score_template",
    }
)

_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    # Training only.
    "lora_dropout": (int, float),
    "inference_mode": (bool,),
    # How training was initialized; they matter only if init_lora_weights names them, which is then refused.
    "loftq_config": (dict,),
    "eva_config": (dict,),
    "corda_config": (dict,),
    "lora_ga_config": (dict,),
    # Used only with use_qalora or megatron_config, which are refused.
    "qalora_group_size": (int,),
    "megatron_core": (str,),
    # Where the adapter comes from. `auto_mapping` names a module to import: never done here.
    "base_model_name_or_path": (str,),
    "revision": (str,),
    "auto_mapping": (dict,),
    "peft_version": (str,),
}
"""Accepted with any value of these types or null."""

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "task_type": (
        (None, CAUSAL_LM, FEATURE_EXTRACTION, SEQ_CLS),
        f"the only supported adapters with a head of their own are classifiers of whole texts ({SEQ_CLS})",
    ),
    # With "all", trained biases are tensors of the file, which are refused by name: without any, it is plain LoRA. With
    # "lora_only", PEFT before 0.21 did not save them.
    "bias": (("none", "all"), "adapters that train biases are not supported"),
    "fan_in_fan_out": ((False, None), "transposed weights (Conv1D, as in GPT-2) are not supported"),
    "use_qalora": ((False, None), "QA-LoRA is not supported"),
    "use_bdlora": ((None, False), "block-diagonal LoRA is not supported"),
    "velora_config": ((None,), "VeLoRA is not supported"),
    "kasa_config": ((None,), "KaSA changes the base weights"),
    "monteclora_config": ((None,), "Monte Carlo LoRA is not supported"),
    "arrow_config": ((None,), "Arrow routing is not supported"),
    "layer_replication": ((None, []), "replicated layers would change the shared base model"),
    "megatron_config": ((None,), "Megatron layers are not supported"),
    "runtime_config": ((None, {}, {"ephemeral_gpu_offload": False}), "PEFT never saves this field"),
    # Written by PEFT before 0.3.
    "enable_lora": ((None,), "merged linears of PEFT before 0.3 are not supported"),
    "merge_weights": ((False, None), "merged weights of PEFT before 0.3 are not supported"),
}
"""Accepted with these values only, which change nothing; the text says why any other is refused."""

_NOTHING = (None, False, {}, [])

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""How A and B were initialized; the base weights stay as they are (MiCA only freezes B: its forward is plain LoRA)."""

_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _check_init(value: Any) -> None:
    if any(_same(value, plain) for plain in _PLAIN_INITS):
        return
    name, expected = "init_lora_weights", shown(list(_PLAIN_INITS))
    if isinstance(value, str) and value.lower().startswith(_BASE_CHANGING_INITS):
        raise values.refused(
            "unsupported_option",
            f"{shown(value)} changes the base weights when the adapter is loaded",
            name,
            found=shown(value),
            expected=f"one of {expected}",
            remedy="Convert it to plain LoRA: save with PEFT's path_initial_model_for_weight_conversion.",
        )
    raise values.refused(
        "unsupported_option",
        f"{shown(value)} is not supported",
        name,
        found=shown(value),
        expected=f"one of {expected}",
    )


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
