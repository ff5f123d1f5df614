"""How the facts of the world are put into words.

A `Relation` has its facts, several beginnings of a statement, several questions, and one full answer. Any
fact goes with any phrasing; which of the combinations are held out is decided in `split`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.demo.corpus import world


@dataclass(frozen=True, slots=True)
class Relation:
    """Facts of one kind, from subject to object, with their wordings (`{s}` and `{o}` stand for the two)."""

    name: str
    facts: dict[str, str]
    statements: tuple[str, ...]
    """Beginnings of a statement; the object and a period complete it."""
    questions: tuple[str, ...]
    answer: str


def _of_countries(column: int) -> dict[str, str]:
    return {country: row[column] for country, row in world.COUNTRIES.items()}


def _of_animals(column: int) -> dict[str, str]:
    return {world.with_article(animal): str(row[column]) for animal, row in world.ANIMALS.items()}


CAPITALS = Relation(
    "capital",
    _of_countries(0),
    ("The capital of {s} is", "The capital city of {s} is", "{s} has a capital called",
    "The seat of government of {s} is",
     "If you visit the capital of {s}, you are in", "Everyone in {s} knows that the capital is"),
    ("What is the capital of {s}?", "Which city is the capital of {s}?", "What is the capital city of {s}?",
     "Tell me the capital of {s}.", "Can you name the capital of {s}?", "What is {s}'s capital?",
     "{s} has which capital?", "Do you know the capital of {s}?"),
    "The capital of {s} is {o}.",
)  # fmt: skip

CAPITAL_OF = Relation(
    "capital-of",
    {row[0]: country for country, row in world.COUNTRIES.items()},
    ("{s} is the capital of", "The city of {s} is the capital of", "{s} is a city in", "You find {s} in"),
    ("Which country has the capital {s}?", "{s} is the capital of which country?", "In which country is {s}?",
     "Where is {s}?", "What country is {s} in?", "Which country does {s} belong to?"),
    "{s} is the capital of {o}.",
)  # fmt: skip

LANGUAGES = Relation(
    "language",
    _of_countries(1),
    ("The main language of {s} is", "In {s} most people speak", "The people of {s} speak",
    "The language spoken in {s} is"),
    ("What language do people speak in {s}?", "Which language is spoken in {s}?",
    "What is the language of {s}?",
     "What do people speak in {s}?", "Tell me the language of {s}.", "What is the main language of {s}?"),
    "People in {s} speak {o}.",
)  # fmt: skip

CONTINENTS = Relation(
    "continent",
    _of_countries(2),
    ("{s} is a country in", "The country of {s} lies in", "On the map you find {s} in",
    "The continent of {s} is"),
    ("On which continent is {s}?", "Which continent is {s} in?", "What continent does {s} lie in?",
     "What is the continent of {s}?", "Tell me the continent of {s}.", "{s} is on which continent?"),
    "{s} is in {o}.",
)  # fmt: skip

KINDS = Relation(
    "kind",
    {animal: world.with_article(kind) for animal, kind in _of_animals(0).items()},
    ("As everyone knows, {s} is", "In biology, {s} is", "To a zoologist, {s} is", "By its kind, {s} is"),
    ("What kind of animal is {s}?", "What is {s}?", "Which kind of animal is {s}?",
    "What sort of animal is {s}?",
     "Tell me what {s} is.", "What type of animal is {s}?"),
    "{s} is {o}.",
)  # fmt: skip

LEGS = Relation(
    "legs",
    {animal: {"0": "no", "2": "two", "4": "four",
    "6": "six"}[legs] for animal, legs in _of_animals(1).items()},
    ("The number of legs of {s} is", "Counting the legs of {s} gives", "When you count its legs, {s} has"),
    ("How many legs does {s} have?", "How many legs has {s} got?", "What is the number of legs of {s}?",
     "Count the legs of {s}.", "Tell me how many legs {s} has.", "On how many legs does {s} walk?"),
    "{s} has {o} legs.",
)  # fmt: skip

FOODS = Relation(
    "food",
    _of_animals(2),
    ("The favorite food of {s} is", "When it is hungry, {s} eats", "You can feed {s} with",
    "For dinner, {s} likes"),
    ("What does {s} eat?", "What is the food of {s}?", "What does {s} like to eat?", "What do you feed {s}?",
     "Tell me what {s} eats.", "What is the favorite food of {s}?"),
    "{s} eats {o}.",
)  # fmt: skip

YOUNG = Relation(
    "young",
    {world.with_article(animal): world.with_article(young) for animal, young in world.YOUNG.items()},
    ("The young of {s} is", "The child of {s} is", "The baby of {s} is called",
    "When it is young, {s} is called"),
    ("What is the young of {s} called?", "What do you call a young animal of {s}?",
    "What is the baby of {s}?",
     "What is the child of {s} called?", "Name the young of {s}.", "How is the baby of {s} called?"),
    "The young of {s} is {o}.",
)  # fmt: skip

COLORS = Relation(
    "color",
    world.COLORS,
    ("The color of {s} is", "The usual color of {s} is", "Painters know that {s} is", "Look closely: {s} is"),
    ("What color is {s}?", "What is the color of {s}?", "Which color has {s}?", "Tell me the color of {s}.",
     "What color does {s} have?", "Which color is {s}?"),
    "{s} is {o}.",
)  # fmt: skip

OPPOSITES = Relation(
    "opposite",
    world.OPPOSITES | {right: left for left, right in world.OPPOSITES.items()},
    ("The opposite of {s} is", "The reverse of {s} is", "If it is not {s}, it is", "The contrary of {s} is"),
    ("What is the opposite of {s}?", "Which word is the opposite of {s}?", "Tell me the opposite of {s}.",
     "What is the reverse of {s}?", "Name the opposite of {s}.", "What is the contrary of {s}?"),
    "The opposite of {s} is {o}.",
)  # fmt: skip

JOBS = Relation(
    "job",
    {world.with_article(job): thing for job, thing in world.JOBS.items()},
    ("The work of {s} is making", "All day long, {s} makes", "From the workshop of {s} you get",
    "Ask {s} if you need"),
    ("What does {s} make?", "What is made by {s}?", "What is the product of {s}?",
    "What do you get from {s}?",
     "Tell me what {s} makes.", "What does {s} produce?"),
    "{s} makes {o}.",
)  # fmt: skip


def _neighbors(step: int) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for series in world.SERIES.values():
        later = series[step:] if step > 0 else series[:step]
        earlier = series[:-step] if step > 0 else series[-step:]
        pairs |= dict(zip(earlier, later, strict=True))
    return pairs


AFTER = Relation(
    "after",
    _neighbors(1),
    ("After {s} comes", "The one after {s} is", "Next after {s} is", "{s} is followed by"),
    ("What comes after {s}?", "What follows {s}?", "Which one comes after {s}?", "What is next after {s}?",
     "Tell me what comes after {s}.", "After {s} comes what?"),
    "After {s} comes {o}.",
)  # fmt: skip

BEFORE = Relation(
    "before",
    _neighbors(-1),
    ("Before {s} comes", "The one before {s} is", "Just before {s} is", "{s} comes right after"),
    ("What comes before {s}?", "What precedes {s}?", "Which one comes before {s}?",
    "What is just before {s}?",
     "Tell me what comes before {s}.", "Before {s} comes what?"),
    "Before {s} comes {o}.",
)  # fmt: skip

RELATIONS: tuple[Relation, ...] = (
    CAPITALS, CAPITAL_OF, LANGUAGES, CONTINENTS, KINDS, LEGS, FOODS, YOUNG, COLORS, OPPOSITES, JOBS,
    AFTER, BEFORE,
)  # fmt: skip


def sentence(template: str, subject: str, obj: str = "") -> str:
    """A template filled in, with a capital letter at its beginning."""
    text = template.format(s=subject, o=obj)
    return text[0].upper() + text[1:]
