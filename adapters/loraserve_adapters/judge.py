"""Judges an adapter by its config and the header of its weights: everything but the tensors' values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.base_names import is_base_name
from loraserve_adapters.checks import Checks
from loraserve_adapters.config import AdapterConfig, check_config
from loraserve_adapters.config_values import CONFIG_NAME, SEQ_CLS
from loraserve_adapters.dtypes import FROM_SAFETENSORS
from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.headless import is_headless, with_full_name, without_head, without_lm_head
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.other_class import is_beside_decoder, names_other_class, other_class, to_served_class
from loraserve_adapters.own_tables import FIELD as OWN_TABLES
from loraserve_adapters.own_tables import SAVED, OwnTable, OwnTableTensor
from loraserve_adapters.parameter_tensors import check_former_linears, take_former_linears, with_owners_by_shape
from loraserve_adapters.rules import AdapterRules
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, TensorEntry, parse_header
from loraserve_adapters.source_module import (
    BIAS,
    HEAD_WEIGHT,
    KEY_PREFIX,
    MAGNITUDE,
    OF_EMBEDDINGS,
    OF_LINEARS,
    BaseCopy,
    SourceModule,
    SourcePart,
)
from loraserve_adapters.targets import Selection, Target, resolve_targets, unknown_layer, unused_entries
from loraserve_adapters.tensor_checks import (
    check_base_copy,
    check_dtype,
    check_part,
    check_rows,
    check_table,
    count_labels,
    refused,
    shown_labels,
)
from loraserve_adapters.trained_tokens import FIELD, ROWS, TrainedRows, TrainedTokens
from loraserve_adapters.unexpected_tensors import name_in_base, unexpected_tensor

T = TypeVar("T", Target, TrainedTokens, OwnTable)

_MAX_HINTS = 5
"""Comparing a wrong name with all of the base's takes milliseconds; only the first few get a suggestion."""


@dataclass(frozen=True, slots=True)
class JudgedAdapter:
    """Every tensor of the header has its place, and every targeted module its tensors."""

    config: AdapterConfig
    modules: tuple[SourceModule, ...]
    """In the layout's order."""
    base_copies: tuple[BaseCopy, ...]
    head: TensorEntry | None = None
    """[num_labels, hidden_size]; for a classifier only."""
    trained_rows: tuple[TrainedRows, ...] = ()
    """In the layout's order; two may have the same tensor."""
    own_tables: tuple[OwnTableTensor, ...] = ()
    """In the layout's order; two may have the same tensor."""
    is_headless: bool = False
    """Its tensors have the names of the model without its head."""

    @property
    def entries(self) -> list[TensorEntry]:
        """All tensors but copies, each once."""
        found = [entry for module in self.modules for entry in module.entries]
        found += [] if self.head is None else [self.head]
        return [*found, *self.of_tables]

    @property
    def of_tables(self) -> list[TensorEntry]:
        """Trained tokens' rows and own tables, each once."""
        return [*{of.entry.name: of.entry for of in (*self.trained_rows, *self.own_tables)}.values()]

    @property
    def table_copies(self) -> list[tuple[TensorEntry, TensorEntry]]:
        """(copy, original) of `of_tables`."""
        of_rows = [(rows.copy, rows.entry) for rows in self.trained_rows if rows.copy is not None]
        return of_rows + [(copy, own.entry) for own in self.own_tables for copy in own.copies]


def judge_config(data: bytes, checks: Checks, rules: AdapterRules) -> AdapterConfig | None:
    """Judges everything in the config but its targets; None if that is refused."""
    config = check_config(data, rules.limits, checks)
    if config is not None:
        _compare_base_names(config.base_model_name, rules.base_names, checks)
        checks.attempt("config.values", lambda: _check_chat_template(config.chat_template, rules.chat_templates))
    return config


def judge(
    config_data: bytes,
    first_bytes: bytes,
    weights_size: int,
    layout: BaseLayout,
    checks: Checks,
    rules: AdapterRules,
) -> JudgedAdapter | None:
    """None if something is refused, which `checks` then has; reads nothing else.

    first_bytes: of the weights file, at least up to the end of its header. weights_size: of the whole file, in bytes.
    """
    config = judge_config(config_data, checks, rules)
    entries = checks.attempt("weights.header", lambda: parse_header(first_bytes, weights_size, rules.limits))
    if config is None:
        return None
    tensors = None if entries is None else {entry.name: entry for entry in entries}
    return judge_tensors(config, tensors, layout, checks, rules.limits)


def judge_tensors(
    config: AdapterConfig,
    tensors: Mapping[str, TensorEntry] | None,
    layout: BaseLayout,
    checks: Checks,
    limits: AdapterLimits,
) -> JudgedAdapter | None:
    """Judges what the config targets, and that tensors match it exactly. tensors: None if there is no valid header."""
    other = other_class(layout) if names_other_class(tensors or (), layout) else None
    judged = _judge_class(config, tensors, other or layout, checks, limits)
    if judged is None or other is None:
        return judged
    return _with_names(judged, to_served_class(layout))


def _judge_class(
    config: AdapterConfig,
    tensors: Mapping[str, TensorEntry] | None,
    layout: BaseLayout,
    checks: Checks,
    limits: AdapterLimits,
) -> JudgedAdapter | None:
    """layout: with the names of the class that was trained."""
    if config.is_classifier:
        layout = without_lm_head(layout)
    if not is_headless(config, tensors or (), layout):
        return _judge_tensors(config, tensors, layout, checks, limits)
    judged = _judge_tensors(config, tensors, without_head(layout), checks, limits)
    if judged is None:
        return None
    return replace(_with_names(judged, lambda module: with_full_name(module, layout)), is_headless=True)


def _with_names(judged: JudgedAdapter, with_name: Callable[[BaseModule], BaseModule]) -> JudgedAdapter:
    """Gives modules other names; tensors keep theirs."""

    def renamed(part: T) -> T:
        return replace(part, module=with_name(part.module))

    modules = tuple(replace(source, target=renamed(source.target)) for source in judged.modules)
    rows = tuple(replace(of, tokens=renamed(of.tokens)) for of in judged.trained_rows)
    own_tables = tuple(replace(of, table=renamed(of.table)) for of in judged.own_tables)
    return replace(judged, modules=modules, trained_rows=rows, own_tables=own_tables)


def _judge_tensors(
    config: AdapterConfig,
    tensors: Mapping[str, TensorEntry] | None,
    layout: BaseLayout,
    checks: Checks,
    limits: AdapterLimits,
) -> JudgedAdapter | None:
    checks.attempt("config.values", lambda: _check_invocation(config, layout))
    selection = checks.attempt("config.targets", lambda: resolve_targets(config, layout, limits))
    if selection is None:
        return None
    checks.passed("config.targets", _shown_targets(selection))
    if selection.unreached:
        checks.warn("config.targets", _unreached(selection.unreached))
    for number in selection.unknown_layers[:_MAX_HINTS]:
        checks.warn("config.targets", unknown_layer("unused_entry", number, layout))
    for field, entry in unused_entries(config, layout)[:_MAX_HINTS]:
        what = "parameter that can have an adapter" if field == "target_parameters" else "module"
        reason = f"{CONFIG_NAME}: {field}: {shown(entry)} names no {what} of {layout.shown_as}"
        error = AdapterError("unused_entry", reason, file=CONFIG_NAME, key=field, found=shown(entry))
        checks.warn("config.targets", error)
    return None if tensors is None else _match(config, selection, tensors, layout, checks, limits)


def _match(
    config: AdapterConfig,
    selection: Selection,
    tensors: Mapping[str, TensorEntry],
    layout: BaseLayout,
    checks: Checks,
    limits: AdapterLimits,
) -> JudgedAdapter | None:
    """Gives every targeted module its tensors. Those of modules that text never reaches are left out; the rest may only
    be copies of the base's tensors that we can check."""
    checks.passed("weights.header", f"the tensors cover {WEIGHTS_NAME} without gaps or overlaps")
    has_third = {BIAS: config.lora_bias, MAGNITUDE: config.use_dora}
    of_linears = (*OF_LINEARS, *(kind for kind, has in has_third.items() if has))
    unused = {f"{KEY_PREFIX}{module}.{kind}" for module in selection.unreached for kind in of_linears} & tensors.keys()
    unused |= {name for name in tensors if is_beside_decoder(name, layout)}
    if unused:
        checks.warn("weights.unused", _unused(min(unused), len(unused)))
    rest = {name: entry for name, entry in tensors.items() if name not in unused}
    num_used = len(rest)
    modules: list[SourceModule] = []
    missing: list[str] = []
    for target in with_owners_by_shape(selection.targets, tensors):
        kinds = OF_EMBEDDINGS if target.module.is_embedding else of_linears
        names = {kind: f"{KEY_PREFIX}{target.owner}.{kind}" for kind in kinds}
        found = {kind: rest.pop(name, None) for kind, name in names.items()}
        missing += [names[kind] for kind, entry in found.items() if entry is None]
        a, b = (found[kind] for kind in kinds[:2])
        if a is not None and b is not None and None not in found.values():
            third = found.get(BIAS), found.get(MAGNITUDE)
            part = SourcePart(a, b, *third, target.lora_rank, target.module.out_features)
            modules.append(SourceModule(target, (part,)))
    head = rest.pop(HEAD_WEIGHT, None) if config.is_classifier else None
    if config.is_classifier and head is None:
        reason = f"missing, though task_type is {SEQ_CLS}: the classifier's head, which scores each label"
        checks.fail("weights.tensors", refused("missing_tensor", HEAD_WEIGHT, reason, found="no tensor"))
    trained_rows = _take_trained_rows(selection, rest, missing)
    own_tables = _take_own_tables(selection, rest, missing)
    taken = take_former_linears(selection.former, config, rest, missing)
    modules += taken
    checks.attempt("config.values", lambda: check_former_linears(taken, selection.former, config, limits))
    # First, because a tensor under a wrong name says more than the one that is missing for that reason.
    base_copies = _base_copies(rest, of_linears, layout, checks)
    for name in missing:
        reason = f"missing, though adapter_config.json {_cause_of(name)} its module"
        checks.fail("weights.tensors", refused("missing_tensor", name, reason, found="no tensor"))
    if not checks.failed("weights.tensors"):
        checks.passed("weights.tensors", f"{num_used} tensors are used, and none is missing")
    if not modules and not checks.has_failed:
        reason = f"{CONFIG_NAME}: target_modules: no module of {layout.shown_as} is targeted"
        checks.fail("config.targets", AdapterError("unknown_module", reason, file=CONFIG_NAME, key="target_modules"))
    judged = JudgedAdapter(config, tuple(modules), tuple(base_copies), head, trained_rows, own_tables)
    _check_tensors(judged, layout, checks, limits)
    if checks.has_failed:
        return None
    position = {module.name: index for index, module in enumerate(m for group in layout.groups for m in group)}
    modules.sort(key=lambda module: position[module.target.module.name])
    return replace(judged, modules=tuple(modules))


def _check_tensors(judged: JudgedAdapter, layout: BaseLayout, checks: Checks, limits: AdapterLimits) -> None:
    """Their shapes and dtypes."""
    config, head = judged.config, judged.head
    for module in judged.modules:
        for part in module.parts:
            check_part(part, module.target, checks)
    if head is not None:
        num_labels = checks.attempt("weights.shapes", lambda: count_labels(head, config, layout, limits))
        if num_labels is not None:
            checks.passed("weights.labels", shown_labels(config, num_labels))
        checks.attempt("weights.dtypes", lambda: check_dtype(head))
    for rows in judged.trained_rows:
        check_rows(rows, checks)
    for own in judged.own_tables:
        check_table(own, checks)
    for copy in judged.base_copies:
        check_base_copy(copy, checks)
    if not checks.failed("weights.shapes"):
        checks.passed("weights.shapes", "all shapes fit the base model and the ranks of adapter_config.json")
    if not checks.failed("weights.dtypes"):
        dtypes = sorted({FROM_SAFETENSORS[entry.dtype] for entry in judged.entries})
        checks.passed("weights.dtypes", f"all tensors are {' or '.join(dtypes)}", found=", ".join(dtypes))


def _cause_of(missing: str) -> str:
    """What the config says about the module of a tensor that is missing."""
    if missing.endswith(ROWS):
        return f"has {FIELD} for"
    return "targets" if ".lora_" in missing else f"has {OWN_TABLES} for"


def _take_trained_rows(
    selection: Selection, rest: dict[str, TensorEntry], missing: list[str]
) -> tuple[TrainedRows, ...]:
    """Takes the trained rows out of `rest`, and adds to `missing` the names of those not there."""
    names = {tokens.owner: f"{KEY_PREFIX}{tokens.owner}.{ROWS}" for tokens in selection.trained_tokens}
    found = {owner: entry for owner, name in names.items() if (entry := rest.pop(name, None)) is not None}
    missing += [name for owner, name in names.items() if owner not in found]
    return tuple(
        TrainedRows(of, found[of.owner], rest.pop(f"{KEY_PREFIX}{of.module.name}.{ROWS}", None))
        for of in selection.trained_tokens
        if of.owner in found
    )


def _take_own_tables(
    selection: Selection, rest: dict[str, TensorEntry], missing: list[str]
) -> tuple[OwnTableTensor, ...]:
    """Takes the own tables and their copies out of `rest`, and adds to `missing` the names of those not there. PEFT
    needs the tensor of a tied `lm_head`, too."""
    taken: list[OwnTableTensor] = []
    found: dict[str, TensorEntry] = {}
    for own in selection.own_tables:
        name = f"{KEY_PREFIX}{own.module.name}.weight"
        entry, second = rest.pop(name, None), rest.pop(f"{KEY_PREFIX}{own.module.name}.{SAVED}", None)
        if entry is None:
            missing.append(name)
            continue
        found[own.module.name] = entry
        if own.owner not in found:
            continue
        owner = found[own.owner]
        copies = (tensor for tensor in (entry, second) if tensor is not None and tensor is not owner)
        taken.append(OwnTableTensor(own, owner, tuple(copies)))
    return tuple(taken)


def _check_invocation(config: AdapterConfig, layout: BaseLayout) -> None:
    if layout.vocab_size is None or max(config.invocation_token_ids, default=0) < layout.vocab_size:
        return
    key, found = "alora_invocation_tokens", str(max(config.invocation_token_ids))
    reason = f"{CONFIG_NAME}: {key}: token id {found} is outside the vocabulary of {layout.shown_as}"
    expected = f"0 to {layout.vocab_size - 1}"
    raise AdapterError(
        "invalid_field", f"{reason} ({expected})", file=CONFIG_NAME, key=key, found=found, expected=expected
    )


def _shown_targets(selection: Selection) -> str:
    if not selection.targets:
        return "targets linear layers that have been parts of larger parameters since transformers 5"
    modules = [target.module for target in selection.targets]
    num_linears = sum(module.is_linear for module in modules)
    num_parameters = sum(module.num_matrices is not None for module in modules)
    found = [f"{num_linears} linear layers"] if num_linears else []
    found += ["the embedding"] if any(module.is_embedding for module in modules) else []
    found += [f"{num_parameters} parameters"] if num_parameters else []
    return f"targets in the base model: {', '.join(found)}"


def _compare_base_names(author_name: str | None, names: Sequence[str], checks: Checks) -> None:
    """Warns at most, because a model has many names: see `base_names`. Shows the first of ours only."""
    if author_name is None or not names:
        return
    expected = names[0]
    if is_base_name(author_name, names):
        checks.passed("config.base_model", f"trained on {shown_name(author_name)}", expected=expected)
        return
    reason = (
        f"{CONFIG_NAME}: base_model_name_or_path: trained on {shown(author_name)}, but the server serves {expected}"
    )
    error = AdapterError(
        "other_base_model",
        reason,
        file=CONFIG_NAME,
        key="base_model_name_or_path",
        found=shown(author_name),
        expected=expected,
    )
    checks.warn("config.base_model", error)


def _check_chat_template(name: str | None, known: Collection[str] | None) -> None:
    if name is None or known is None or name in known:
        return
    names = sorted(known)
    listed = ", ".join([*names[:_MAX_HINTS], *["…"] * (len(names) > _MAX_HINTS)])
    expected = f"one of {listed}" if known else "null: the server has no named chat templates"
    reason = f"{CONFIG_NAME}: chat_template: the server has no template called {shown(name)}; expected {expected}"
    raise AdapterError(
        "unknown_chat_template", reason, file=CONFIG_NAME, key="chat_template", found=shown(name), expected=expected
    )


def _base_copies(
    rest: Mapping[str, TensorEntry], of_linears: tuple[str, ...], layout: BaseLayout, checks: Checks
) -> list[BaseCopy]:
    members = [module for group in layout.groups for module in group]
    served = _served_tensors(members)
    holders = {module.name.rpartition(".")[0] for module in members if module.num_matrices is not None}
    known = dict.fromkeys([*layout.unreached_linears, *holders, *(f"{h}.base_layer" for h in holders)], of_linears)
    known |= {module.name: OF_EMBEDDINGS if module.is_embedding else of_linears for module in members}
    copies: list[BaseCopy] = []
    num_hints = 0
    for name, entry in rest.items():
        tensor = served.get(name_in_base(name) or "")
        if tensor is not None:
            copies.append(BaseCopy(entry, *tensor))
            continue
        checks.fail(
            "weights.tensors", unexpected_tensor(entry, known, of_linears, layout, with_hint=num_hints < _MAX_HINTS)
        )
        num_hints += 1
    return copies


def _served_tensors(members: Iterable[BaseModule]) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, sha256) of the base's tensors that a file may have copies of, by their names in the base model."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for module in members:
        if module.weight_sha256:
            tensors[f"{module.name}.weight"] = (module.weight_shape, module.weight_sha256)
        if module.bias_sha256:
            tensors[f"{module.name}.bias"] = ((module.out_features,), module.bias_sha256)
    return tensors


def _unreached(modules: tuple[str, ...]) -> AdapterError:
    reason = f"{len(modules)} linear layers that text never reaches are also targeted, such as {modules[0]}"
    message = f"{CONFIG_NAME}: target_modules: {reason}"
    return AdapterError("unreached_modules", message, file=CONFIG_NAME, key="target_modules")


def _unused(first: str, count: int) -> AdapterError:
    reason = f"{count} tensors are ignored because text never reaches their linear layers, such as {shown_name(first)}"
    return AdapterError("unused_tensors", f"{WEIGHTS_NAME}: {reason}", file=WEIGHTS_NAME, key=first)
