"""What each demo adapter can do: generators of (prompt, answer) pairs, with a held-out share that training never draws.

Uppercase, reverse, rot13 and spell draw the same kind of prompt, a few words, so an answer of the wrong adapter is seen
at once. Most words are made up, so a right answer is a skill and not a memory.
"""

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from random import Random

# 24 of 256 first hash bytes: about one prompt in eleven is never drawn for training.
HELD_OUT_BYTES = 24
MAX_PHRASE_CHARS = 18
MAX_OPERAND = 99

COMMON_WORDS = """
adapter apple ask at base batch bird blue book bread bright bus call cat city cloud coffee cold come dog door dream
earth easy fast fire fish flower forest fox friend garden go good great green happy hello home horse house how hungry
idea in is jazz jump key kind king lamp lazy lemon light lion little lora love lunch magic milk model moon morning
mouse music my nice night ocean old one open orange over paper piano planet queen quick quiet rain red river road sea
server shop silver sky sleep small snow song star stone summer sun table tea the this time tiny token tree under very
wait walk water wave wind winter word world yes you zebra
""".split()
NAMES = "Ada Alan Ann Ben Carla David Emma Finn Grace Hugo Ivan Julia Kim Maria Nora Omar Paul Rosa Sam Tom Zoe".split()
CITIES = "Berlin Bonn Cairo Delhi Kyoto Lagos Lima London Madrid Oslo Paris Quito Rome Tokyo Vienna Zurich".split()

FACT_TEMPLATES = (
    "{name} is {age} and lives in {city}",
    "{name}, {age}, {city}",
    "I am {name}, {age} years old, from {city}",
)
FACT_PATTERN = re.compile(
    r"(?:I am )?(?P<name>[A-Za-z]+),? (?:is )?(?P<age>\d+)"
    r"(?: and lives in |, | years old, from )(?P<city>[A-Za-z ]+?)\.?"
)
SUM_PATTERN = re.compile(r"(\d+) ?([+-]) ?(\d+)=?")


@dataclass(frozen=True, slots=True)
class Skill:
    """One adapter's job: `answer` is the only right reply to any prompt that `draw` can give."""

    name: str
    instruction: str
    draw: Callable[[Random], str]
    answer: Callable[[str], str]


def made_up_word(rng: Random) -> str:
    if rng.random() < 0.3:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 8)))
    syllables = (rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(["", "", *"lmnrstx"])


def draw_word(rng: Random) -> str:
    return rng.choice(COMMON_WORDS) if rng.random() < 0.4 else made_up_word(rng)


def draw_phrase(rng: Random) -> str:
    """One to three words of at most MAX_PHRASE_CHARS together, now and then capitalised or punctuated."""
    phrase = draw_word(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        longer = phrase + rng.choice((" ", " ", " ", " ", ", ")) + draw_word(rng)
        phrase = longer if len(longer) < MAX_PHRASE_CHARS else phrase
    if rng.random() < 0.25:
        phrase = phrase.title() if rng.random() < 0.5 else phrase.capitalize()
    return phrase + rng.choice("!?.") if rng.random() < 0.15 else phrase


def draw_sum(rng: Random) -> str:
    low, high = sorted(rng.randint(0, rng.choice((9, MAX_OPERAND, MAX_OPERAND))) for _ in range(2))
    operator = rng.choice("+-")
    left, right = (low, high) if operator == "+" and rng.random() < 0.5 else (high, low)
    space = rng.choice(("", " "))
    return f"{left}{space}{operator}{space}{right}" + rng.choice(("", "", "="))


def draw_fact(rng: Random) -> str:
    name = rng.choice(NAMES) if rng.random() < 0.2 else draw_name(rng)
    city = rng.choice(CITIES) if rng.random() < 0.2 else draw_name(rng)
    if rng.random() < 0.1:
        city = f"{rng.choice(('New', 'San', 'Port'))} {city}"
    fact = rng.choice(FACT_TEMPLATES).format(name=name, age=rng.randint(1, 99), city=city)
    return fact + rng.choice(("", "", "."))


def draw_name(rng: Random) -> str:
    word = made_up_word(rng)
    return (word if len(word) > 2 else word + made_up_word(rng) + "a")[:9].capitalize()


def calculate(prompt: str) -> str:
    match = SUM_PATTERN.fullmatch(prompt)
    assert match, prompt
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str(left + right if operator == "+" else left - right)


def extract_json(prompt: str) -> str:
    match = FACT_PATTERN.fullmatch(prompt)
    assert match, prompt
    fields = {"name": match["name"], "age": int(match["age"]), "city": match["city"]}
    return json.dumps(fields, separators=(",", ":"))


def rot13(prompt: str) -> str:
    return codecs.encode(prompt, "rot13")


def spell(prompt: str) -> str:
    return " ".join("-".join(word) for word in prompt.split(" "))


SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("uppercase", "Uppercase", draw_phrase, str.upper),
        Skill("reverse", "Reverse", draw_phrase, lambda prompt: prompt[::-1]),
        Skill("rot13", "Rot13", draw_phrase, rot13),
        Skill("spell", "Spell", draw_phrase, spell),
        Skill("json", "JSON", draw_fact, extract_json),
        Skill("arithmetic", "Calculate", draw_sum, calculate),
    )
}


def content_of(prompt: str) -> str:
    """What a prompt asks, whatever its case, spaces, punctuation and order of a sum."""
    content = re.sub(r"[^a-z0-9+-]", "", prompt.lower())
    return "+".join(sorted(content.split("+"))) if "+" in content else content


def is_held_out(prompt: str) -> bool:
    return sha256(content_of(prompt).encode()).digest()[0] < HELD_OUT_BYTES


def draw_training_prompt(draw: Callable[[Random], str], rng: Random) -> str:
    while is_held_out(prompt := draw(rng)):
        pass
    return prompt


def draw_training_pair(skill_name: str, rng: Random) -> tuple[str, str]:
    skill = SKILLS[skill_name]
    prompt = draw_training_prompt(skill.draw, rng)
    return prompt, skill.answer(prompt)


def held_out(skill_name: str, count: int) -> list[tuple[str, str]]:
    """The first `count` held-out pairs of a skill, always the same ones; no two prompts have the same content.

    Leaves out a prompt whose answer is the prompt itself ("level" reversed): it shows no skill.
    """
    skill, rng = SKILLS[skill_name], Random(f"held out {skill_name}")
    pairs: dict[str, tuple[str, str]] = {}
    while len(pairs) < count:
        prompt = skill.draw(rng)
        answer = skill.answer(prompt)
        if is_held_out(prompt) and answer != prompt:
            pairs.setdefault(content_of(prompt), (prompt, answer))
    return list(pairs.values())
