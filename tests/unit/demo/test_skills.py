import json
from random import Random

import pytest

from loraserve.demo.skills import (
    MAX_PHRASE_CHARS,
    SKILLS,
    content_of,
    draw_training_pair,
    draw_training_prompt,
    held_out,
    is_held_out,
)

each_skill = pytest.mark.parametrize("skill_name", SKILLS)


@pytest.mark.parametrize(
    ("skill_name", "prompt", "answer"),
    [
        ("uppercase", "Quick fox!", "QUICK FOX!"),
        ("reverse", "quick fox", "xof kciuq"),
        ("rot13", "Hello", "Uryyb"),
        ("spell", "quick fox", "q-u-i-c-k f-o-x"),
        ("json", "Ann is 31 and lives in Oslo", '{"name":"Ann","age":31,"city":"Oslo"}'),
        ("json", "Ann, 31, New Oslo.", '{"name":"Ann","age":31,"city":"New Oslo"}'),
        ("json", "I am Ann, 31 years old, from Oslo", '{"name":"Ann","age":31,"city":"Oslo"}'),
        ("arithmetic", "27+58", "85"),
        ("arithmetic", "58 - 27=", "31"),
    ],
)
def test_skills_give_the_expected_answers(skill_name, prompt, answer):
    assert SKILLS[skill_name].answer(prompt) == answer


@each_skill
def test_held_out_pairs_are_distinct_correct_and_reproducible(skill_name):
    pairs = held_out(skill_name, 200)
    assert pairs == held_out(skill_name, 200)
    assert pairs[:50] == held_out(skill_name, 50)
    assert len({content_of(prompt) for prompt, _ in pairs}) == 200
    assert all(SKILLS[skill_name].answer(prompt) == answer != prompt for prompt, answer in pairs)


@each_skill
def test_training_never_draws_a_held_out_prompt(skill_name):
    rng = Random(1)
    trained = {draw_training_pair(skill_name, rng)[0] for _ in range(5000)}
    evaluated = {prompt for other in SKILLS for prompt, _ in held_out(other, 200)}
    assert not trained & evaluated
    assert not any(map(is_held_out, trained))


@each_skill
def test_drawing_training_pairs_is_deterministic_for_a_seed(skill_name):
    first, second = ([draw_training_pair(skill_name, rng) for _ in range(100)] for rng in (Random(7), Random(7)))
    assert first == second


@each_skill
def test_every_training_prompt_has_an_answer(skill_name):
    rng = Random(2)
    assert all(skill_answer for _, skill_answer in (draw_training_pair(skill_name, rng) for _ in range(2000)))


def test_the_split_ignores_case_spaces_punctuation_and_the_order_of_a_sum():
    for prompt, same in (("quick fox", "Quick, Fox!"), ("12+7", "7 + 12="), ("Ann, 3, Oslo", "ann, 3, oslo.")):
        assert is_held_out(prompt) == is_held_out(same)


def test_about_a_tenth_of_the_prompts_is_held_out():
    rng = Random(3)
    num_held_out = sum(is_held_out(SKILLS["reverse"].draw(rng)) for _ in range(5000))
    assert 250 < num_held_out < 750


def test_json_answers_parse_and_contain_only_values_from_the_prompt():
    for prompt, answer in held_out("json", 200):
        fields = json.loads(answer)
        assert list(fields) == ["name", "age", "city"]
        assert all(str(value) in prompt for value in fields.values())


def test_phrases_are_short_enough_for_a_small_model():
    rng = Random(4)
    phrases = [draw_training_prompt(SKILLS["reverse"].draw, rng) for _ in range(2000)]
    assert max(map(len, phrases)) <= MAX_PHRASE_CHARS


def test_word_skills_rarely_share_an_answer():
    word_skills = [skill for skill in SKILLS.values() if skill.draw is SKILLS["reverse"].draw]
    shared = [
        prompt
        for prompt, _ in held_out("reverse", 200)
        if len({skill.answer(prompt) for skill in word_skills} | {prompt}) <= len(word_skills)
    ]
    assert len(shared) <= 10, "short palindromes and the like"
