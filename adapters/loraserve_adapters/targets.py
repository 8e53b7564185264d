"""Which modules a config targets, and with which rank and scaling: PEFT's semantics on names before any fusion.

Follows `check_target_module_exists`, `get_pattern_key`, `LoraModel._create_and_replace` and, for bare weights,
`BaseTuner._inject_parameters` of PEFT 0.21.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.config import ALL_LINEAR, CONFIG_NAME, AdapterConfig
from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.former_linears import FormerLinear, former_linears
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.module_pattern import ModulePattern, StepBudget, Subject
from loraserve_adapters.own_tables import FIELD as OWN_TABLES
from loraserve_adapters.own_tables import OwnTable, resolve_own_tables
from loraserve_adapters.trained_tokens import TrainedTokens, resolve_trained_tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    module: BaseModule
    lora_rank: int
    scaling: float
    """lora_alpha / rank, or / sqrt(rank) for rsLoRA."""
    owner: str
    """The module under whose name PEFT's files have its tensors."""


@dataclass(frozen=True, slots=True)
class FormerLinearTarget:
    linear: FormerLinear
    lora_rank: int
    scaling: float
    """As in `Target`."""


@dataclass(frozen=True, slots=True)
class Selection:
    targets: tuple[Target, ...]
    """In the layout's order."""
    former: tuple[tuple[BaseModule, tuple[FormerLinearTarget, ...]], ...] = ()
    """Bare weights that are not among `targets`, with the targeted linears that they were made of, under one of their
    possible names. They count only if the adapter has tensors for them: today's linears may have such names too."""
    unreached: tuple[str, ...] = ()
    """Names among `BaseLayout.unreached_linears` that are targeted too."""
    trained_tokens: tuple[TrainedTokens, ...] = ()
    own_tables: tuple[OwnTable, ...] = ()
    unknown_layers: tuple[int, ...] = ()
    """Entries of `layers_to_transform` that are no layers of targeted modules, unless of some that the layout lacks."""


def resolve_targets(config: AdapterConfig, layout: BaseLayout, limits: AdapterLimits = DEFAULT_LIMITS) -> Selection:
    """The modules that get LoRA.

    Refuses a target that cannot have an adapter, an entry of `layers_to_transform` that no targeted module is in unless
    the layout lacks modules, and a result without modules.
    """
    budget = StepBudget(limits.max_pattern_steps)
    selector = _Selector(config)
    ranks = _PatternTable("rank_pattern", config.rank_pattern)
    alphas = _PatternTable("alpha_pattern", config.alpha_pattern)
    unreached_linears = frozenset(layout.unreached_linears)
    unreached: list[str] = []
    routers = {module.name.rpartition(".")[0] for group in layout.groups for module in group if module.is_router}
    for name in layout.other_modules:
        if name in routers:
            continue
        is_unreached = name in unreached_linears
        if (is_unreached or config.target_modules != ALL_LINEAR) and selector.targets(Subject(name, budget)):
            if not is_unreached:
                raise _not_a_linear(name, layout)
            unreached.append(name)
    own_tables = resolve_own_tables(config, layout)
    # In PEFT, LoRA on a module of `modules_to_save` is left out, if an entry is its name or a dotted suffix of it.
    names = [own.module.name for own in own_tables]
    without_lora = {name for name in names if not {*_dotted_suffixes(name)}.isdisjoint(config.own_tables)}
    found: list[Target] = []
    former: list[tuple[BaseModule, tuple[FormerLinearTarget, ...]]] = []

    def rank_and_scaling(subject: Subject) -> tuple[int, float]:
        rank = ranks.first_match(subject, config.lora_rank)
        alpha = alphas.first_match(subject, config.lora_alpha)
        return rank, alpha / (rank**0.5 if config.use_rslora else rank)

    for module in (module for group in layout.groups for module in group):
        subject = Subject(module.name, budget)
        if module.name in without_lora or (config.target_modules == ALL_LINEAR and module.is_of_vocabulary):
            continue
        if selector.targets(subject) if module.num_matrices is None else selector.targets_parameter(subject):
            if module.is_embedding and config.lora_bias:
                raise _refused(
                    "invalid_field", "lora_bias", f"cannot be used with LoRA on an embedding, as in PEFT: {module.name}"
                )
            if config.use_dora and not module.is_linear:
                reason = f"is supported for linear layers only, but {module.name} is targeted"
                raise _refused("unsupported_option", "use_dora", reason)
            if module.is_embedding and config.invocation_token_ids:
                reason = f"PEFT applies LoRA on an embedding to all tokens: {module.name}"
                raise _refused("invalid_field", "alora_invocation_tokens", reason)
            if module.is_absorbed and config.invocation_token_ids:
                reason = f"cannot target {module.name}: one adapter applies it to all tokens of a request"
                raise _refused("unsupported_option", "alora_invocation_tokens", reason)
            found.append(Target(module, *rank_and_scaling(subject), module.name))
            continue
        for linears in former_linears(module):
            targeted = [
                FormerLinearTarget(linear, *rank_and_scaling(subject))
                for linear, subject in ((linear, Subject(linear.of_expert(0), budget)) for linear in linears)
                if selector.targets(subject)
            ]
            if targeted:
                former.append((module, tuple(targeted)))
    unknown_layers = selector.unknown_layers() if config.target_modules else ()
    if unknown_layers and not layout.lacks_modules:
        raise unknown_layer("unknown_module", unknown_layers[0], layout)
    if not found and unreached and not former:
        reason = f"no module that text reaches is targeted, only modules such as {unreached[0]}"
        raise _refused("unreached_modules", "target_modules", reason, "Use an adapter that was trained for text.")
    if not found and not former:
        entries = config.target_modules if isinstance(config.target_modules, tuple) else ()
        hint = close_names(entries[0], layout) if entries else ""
        raise _refused("unknown_module", "target_modules", f"no module of {layout.shown_as} is targeted{hint}")
    _check_tying(config, layout, found)
    targeted = [target.module for target in found]
    if both := {*names} & {module.name for module in targeted}:
        raise _refused("invalid_field", "modules_to_save", f"cannot be combined with LoRA on {min(both)}")
    trained_tokens = resolve_trained_tokens(config, layout, targeted, own_tables)
    targets = tuple(_with_owners(found))
    return Selection(targets, tuple(former), tuple(unreached), trained_tokens, own_tables, unknown_layers)


def _check_tying(config: AdapterConfig, layout: BaseLayout, targets: Iterable[Target]) -> None:
    of_vocabulary = [target.module.name for target in targets if target.module.is_of_vocabulary]
    is_tied = any(module.is_tied for group in layout.groups for module in group)
    if config.ensures_weight_tying and is_tied and of_vocabulary:
        reason = f"LoRA shared by the embedding and lm_head is not supported, but {of_vocabulary[0]} is targeted"
        raise _refused("unsupported_option", "ensure_weight_tying", reason)


def refuse_expert_specific_patterns(
    targets: Iterable[tuple[FormerLinear, int]], config: AdapterConfig, limits: AdapterLimits
) -> None:
    """Refuses patterns that give one expert of a layer another rank or alpha than the others: they are one weight.

    targets: (linears that have tensors, number of experts).
    """
    budget = StepBudget(limits.max_pattern_steps)
    tables = (_PatternTable("rank_pattern", config.rank_pattern), _PatternTable("alpha_pattern", config.alpha_pattern))
    for linear, num_experts in targets:
        for table in tables:
            if table.distinguishes_experts(linear, range(num_experts), budget):
                reason = f"differs between the experts of a layer, which are one weight here: {linear.name.format('*')}"
                raise _refused("unsupported_option", table.field, reason)


def _with_owners(targets: Sequence[Target]) -> Iterator[Target]:
    """PEFT wraps a module once for each bare weight that is targeted, the first one innermost."""
    is_outermost: set[str] = set()
    owners: dict[str, str] = {}
    for target in reversed(targets):
        if target.module.num_matrices is not None:
            module = target.module.name.rpartition(".")[0]
            owners[target.module.name] = f"{module}.base_layer" if module in is_outermost else module
            is_outermost.add(module)
    for target in targets:
        yield replace(target, owner=owners.get(target.module.name, target.owner))


def unused_entries(config: AdapterConfig, layout: BaseLayout) -> list[tuple[str, str]]:
    """(field, entry) for each entry of `target_modules`, `target_parameters` and `modules_to_save` that names nothing
    in the base. PEFT tolerates them."""
    members = [module for group in layout.groups for module in group]
    modules = [module.name for module in members if module.num_matrices is None]
    parameters = [module.name for module in members if module.num_matrices is not None]
    targets = () if isinstance(config.target_modules, str) else config.target_modules
    before = [linear.of_expert(0) for module in members for linears in former_linears(module) for linear in linears]
    return [
        *_unused("target_modules", targets, [*layout.other_modules, *modules, *before]),
        *_unused("target_parameters", config.target_parameters, parameters),
        *_unused_ends(OWN_TABLES, config.own_tables, [*layout.other_modules, *modules]),
    ]


def _unused(field: str, entries: Iterable[str], names: Iterable[str]) -> list[tuple[str, str]]:
    used = {suffix for name in names for suffix in _dotted_suffixes(name)}
    return [(field, entry) for entry in entries if entry not in used]


def _unused_ends(field: str, entries: Iterable[str], names: Sequence[str]) -> list[tuple[str, str]]:
    return [(field, entry) for entry in entries if not any(name.endswith(entry) for name in names)]


def close_names(name: str, layout: BaseLayout) -> str:
    """ "; did you mean q_proj, k_proj?" or nothing, for the end of an error message."""
    names = [module.name for group in layout.groups for module in group]
    if "." not in name:
        names = sorted({known.rpartition(".")[2] for known in names})
    close = difflib.get_close_matches(name[:128], names, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else ""


class _Selector:
    """Decides for each module name whether the config targets it; remembers which layers it saw.

    As in PEFT, an entry of `target_modules` that names no module is harmless beside one that does: the adapter's
    tensors are checked against the modules that are targeted.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._targets = _NameSet("target_modules", config.target_modules)
        self._parameters = _NameSet("target_parameters", config.target_parameters)
        self._excluded = _NameSet("exclude_modules", config.exclude_modules)
        self._layers = frozenset(config.layers_to_transform)
        self._layers_seen: set[int] = set()
        self._layer_expressions = _layer_expressions(config.layers_pattern)

    def targets(self, subject: Subject) -> bool:
        entry = self._targets.matching_entry(subject)
        if entry is None or self._excluded.matching_entry(subject) is not None:
            return False
        # An entry that is the whole name applies whatever its layer.
        if not self._layers or entry == subject.name:
            return True
        number = self._layer_number(subject.name)
        if number is not None:
            self._layers_seen.add(number)
        return number in self._layers

    def targets_parameter(self, subject: Subject) -> bool:
        """Ignores layer selection and exclusions, as PEFT does."""
        return self._parameters.matching_entry(subject) is not None

    def _layer_number(self, name: str) -> int | None:
        for expression in self._layer_expressions:
            match = expression.match(name)
            if match is not None:
                return int(match["index"])
        return None

    def unknown_layers(self) -> tuple[int, ...]:
        """Entries of `layers_to_transform` that no targeted module is in, ascending."""
        return tuple(sorted(self._layers - self._layers_seen))


class _NameSet:
    """`target_modules`, `target_parameters` or `exclude_modules`: names and dotted suffixes, or one pattern for the
    whole name."""

    def __init__(self, field: str, value: tuple[str, ...] | str) -> None:
        self._all_linear = value == ALL_LINEAR and field == "target_modules"
        is_pattern = isinstance(value, str) and value != "" and not self._all_linear
        self._pattern = ModulePattern(value, field) if isinstance(value, str) and is_pattern else None
        self._entries = frozenset() if isinstance(value, str) else frozenset(value)

    def matching_entry(self, subject: Subject) -> str | None:
        """The longest entry that names the module (the whole name counts as longest), "" for a pattern, or None."""
        if self._all_linear:
            return ""
        if self._pattern is not None:
            return "" if self._pattern.matches_fully(subject) else None
        matched = [suffix for suffix in _dotted_suffixes(subject.name) if suffix in self._entries]
        return matched[0] if matched else None


class _PatternTable(Generic[T]):
    """`rank_pattern` or `alpha_pattern`: the first key with `re.match(rf"(.*\\.)?({key})$", name)` gives the value."""

    def __init__(self, field: str, items: Sequence[tuple[str, T]]) -> None:
        self.field = field
        self._has_last_parts_only = all(re.fullmatch(r"\w+", pattern) for pattern, _ in items)
        self._items = [(_suffix_matcher(pattern, field), value) for pattern, value in items]

    def first_match(self, subject: Subject, default: T) -> T:
        return next((value for matches, value in self._items if matches(subject)), default)

    def distinguishes_experts(self, linear: FormerLinear, experts: range, budget: StepBudget) -> bool:
        """Whether the linear's values differ between experts, whose names have the same last part."""
        if self._has_last_parts_only:
            return False
        subjects = (Subject(linear.of_expert(expert), budget) for expert in experts)
        return len({next((v for matches, v in self._items if matches(s)), None) for s in subjects}) > 1


def _suffix_matcher(pattern: str, field: str) -> Callable[[Subject], bool]:
    """Full names, which EVA writes by the hundred, are compared as text; other patterns use a `ModulePattern`."""
    if not re.fullmatch(r"(?:[A-Za-z0-9_.]|\\\.)+", pattern):
        return ModulePattern(rf"(.*\.)?({pattern})$", field).matches_start
    plain = pattern.replace("\\.", "\0")
    tail = re.split(r"[.\0]", plain)[-1]
    return lambda subject: subject.name.endswith(tail) and _ends_with(subject.name, plain)


def _ends_with(name: str, plain: str) -> bool:
    """Whether `plain` ("." = any character, NUL = a dot) is all of `name` or its end after a dot."""
    start = len(name) - len(plain)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    return all(
        expected == "." or actual == ("." if expected == "\0" else expected)
        for expected, actual in zip(plain, name[start:], strict=True)
    )


def _layer_expressions(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Each finds the first layer number of a name. Linear enough for `re`: literals between one lazy run and digits."""
    for pattern in patterns:
        if not re.fullmatch(r"[A-Za-z0-9_.]+", pattern):
            raise _refused("unsupported_pattern", "layers_pattern", f"{shown(pattern)}, expected a name such as layers")
    if not patterns:
        return [re.compile(r".*?\.[^.]*\.(?P<index>[0-9]+)\.")]
    return [re.compile(rf"(?:^|.*?\.){pattern}\.(?P<index>[0-9]+)\.") for pattern in patterns]


def _dotted_suffixes(name: str) -> Iterable[str]:
    """ "a.b.c" → "a.b.c", "b.c", "c"."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def unknown_layer(code: str, number: int, layout: BaseLayout) -> AdapterError:
    reason = f"{layout.shown_as} has no layer {number} with targeted modules"
    return _refused(code, "layers_to_transform", reason)


def _not_a_linear(name: str, layout: BaseLayout) -> AdapterError:
    if name in layout.embedding_modules:
        return _refused("unsupported_module", "target_modules", f"LoRA on this embedding is not supported: {name}")
    return _refused("unsupported_module", "target_modules", f"{name} is not a linear layer that can have an adapter")


def _refused(code: str, field: str, reason: str, remedy: str | None = None) -> AdapterError:
    return AdapterError(code, f"{CONFIG_NAME}: {field}: {reason}", file=CONFIG_NAME, key=field, remedy=remedy)
