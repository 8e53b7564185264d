"""`ModulePattern` must agree with `re` on every pattern it accepts, and stay fast where `re` does not."""

import re
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.module_pattern import ModulePattern, StepBudget, Subject

NAMES = (
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.mlp.experts.3.w1",
    "visual.blocks.2.attn.qkv",
)
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:q_proj|k_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|down_proj)))"
)
MS_SWIFT = r"^(model)(?!.*(lm_head|output|emb|visual)).*"


def subject(name: str, steps: int = 1_000_000) -> Subject:
    return Subject(name, StepBudget(steps))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "pattern",
    [
        r".*",
        r".*_proj",
        r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj",
        r".*\.(0|1[0-5])\..*",
        r"(?!lm_head).*",
        r"(?=model).*proj",
        r"[^.]+",
        r"[\w.]+?_head$",
        r"^lm_head$",
        r"(?P<part>model)\.[a-z_]{5,12}",
        r"(a|lm)*_head",
        r"((model|\.|layers|\d)+)\.mlp.*",
        r"\w+\b.\blayers.*\Bproj",
        r"(?:visual(?!.*merger)).*",
        r"",
        r"[a-c]|\D*",
        UNSLOTH,
        MS_SWIFT,
    ],
)
def test_matches_as_re_does(pattern: str, name: str) -> None:
    compiled = ModulePattern(pattern, "target_modules")
    assert compiled.matches_fully(subject(name)) == bool(re.fullmatch(pattern, name))
    assert compiled.matches_start(subject(name)) == bool(re.match(pattern, name))


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}"])
    return st.builds("(?:{}){}".format, inner, counts)


patterns = st.recursive(
    st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", r"\B", "", "ab", r"[a-b\d]"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?={})".format, inner),
        st.builds("(?!{})".format, inner),
        repeated(inner),
    ),
    max_leaves=8,
)


@settings(max_examples=600, deadline=None)
@given(patterns, st.text("ab.1", min_size=1, max_size=7))
@example(r"(?:(?:a|\b)){2,}", "a.a")
def test_random_patterns_match_as_re_does(pattern: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = re.compile(pattern)
    compiled = ModulePattern(pattern, "target_modules")
    assert compiled.matches_fully(subject(name)) == bool(expected.fullmatch(name))
    assert compiled.matches_start(subject(name)) == bool(expected.match(name))


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(.*a){20}b", r"(a|a)*b", r"(.*)*(.*)*(.*)*x", r"((a*)*)*b"])
def test_patterns_that_make_re_hang_take_few_steps(pattern: str) -> None:
    assert not ModulePattern(pattern, "target_modules").matches_fully(subject("a" * 100, steps=100_000))


def test_work_is_bounded_by_the_budget() -> None:
    compiled = ModulePattern(r"((((a|b)*c)*d)*e)*f", "target_modules")
    with pytest.raises(AdapterError, match="too long") as refused:
        compiled.matches_fully(subject("abcdef" * 16, steps=20))
    assert refused.value.code == "pattern_too_complex"


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (r"(a)\1", "unsupported_pattern"),
        (r"(?P<x>a)(?P=x)", "unsupported_pattern"),
        (r"(?<=a)b", "unsupported_pattern"),
        (r"(?<!a)b", "unsupported_pattern"),
        (r"(a)?(?(1)b|c)", "unsupported_pattern"),
        (r"(?>a*)b", "unsupported_pattern"),
        (r"a*+b", "unsupported_pattern"),
        (r"(?i)a", "unsupported_pattern"),
        (r"(?i:a)b", "unsupported_pattern"),
        (r"(?x)a b", "unsupported_pattern"),
        ("(" * 60 + "a" + ")" * 60, "unsupported_pattern"),
        (r"(", "bad_pattern"),
        (r"[", "bad_pattern"),
        (r"*a", "bad_pattern"),
        (r"a{99999999999999999999}", "bad_pattern"),
        ("(" * 256 + ")" * 256, "unsupported_pattern"),
    ],
)
def test_refuses_invalid_and_unsupported_patterns_by_name(pattern: str, code: str) -> None:
    with pytest.raises(AdapterError) as refused:
        ModulePattern(pattern, "adapter_config.json: target_modules")
    assert refused.value.code == code
    assert "target_modules" in refused.value.message


@settings(max_examples=300, deadline=None)
@given(st.text(r"ab.\()[]|*+?{}^$12,<=!:P", max_size=24))
def test_any_text_is_matched_as_re_does_or_refused(pattern: str) -> None:
    try:
        compiled = ModulePattern(pattern, "target_modules")
    except AdapterError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("", "a", "ab.a", "1.b"):
            assert compiled.matches_fully(subject(name)) == bool(re.fullmatch(pattern, name))
