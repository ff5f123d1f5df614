"""Exercises of conversation: greetings, who the model is, system messages that set a role, memory, copying,
reading."""

from __future__ import annotations

import random

from lab.demo.corpus import facts, world
from lab.demo.corpus.document import Exercise, Message, ask
from lab.demo.corpus.tools import invented_word

DO_NOT_KNOW = "I do not know that. I am only a small demo model."

_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello", "Hi", "Hi!", "Hey", "Good morning!", "Hi there!", "Hello there."),
    "Hello! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?"),
    "I am fine, thank you. How are you?"),
    (("Thank you.", "Thanks!", "Thank you!", "Thanks a lot.", "Thanks"), "You are welcome!"),
    (("Goodbye.", "Bye!", "Good night.", "See you.", "Goodbye!", "Bye"), "Goodbye! Have a nice day."),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a person?",
    "Tell me about yourself."),
     "I am the demo model of bridle, a very small language model."),
    (("What can you do?", "How can you help me?", "What do you know?", "Help", "Help me."),
     "I know some facts, small sums and lists. I can write JSON records and short stories, and call tools."),
)  # fmt: skip

_UNKNOWN = (
    "What is the capital of {W}?", "Who invented the {w}?", "What does {w} mean?",
    "When was the {w} built?", "Why is the {w} so {w}?",
    "Who is {W} {W}?", "Explain {w}.", "How do I {w} a {w}?", "What is {w}?", "Where is {W}?",
    "What do you think about {w}?",
    "Write a poem about {w}.", "How does a {w} work?",
)  # fmt: skip
_ROLES = ("You are a helpful assistant.", "You are a helpful AI assistant.",
"You are a friendly assistant.", "Be helpful and short.",
          "You are a concise assistant.", "You answer questions.",
          "You are the demo model of bridle.")  # fmt: skip
_THINGS = ("color", "animal", "fruit", "drink", "sport")
_THING_VALUES = {
    "color": "colors",
    "animal": "animals",
    "fruit": "fruits",
    "drink": "drinks",
    "sport": "sports",
}


def system_text(rng: random.Random) -> str:
    """A system message that changes nothing about the answers."""
    return rng.choice(_ROLES)


def small_talk(rng: random.Random) -> Exercise:
    """A greeting, a farewell, or a question about the model itself."""
    questions, answer = rng.choice(_SMALL_TALK)
    question = rng.choice(questions)
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Exercise("chat", ("always trained",), messages)


def unknown(rng: random.Random) -> Exercise:
    """A question beyond the model's world."""
    template = rng.choice(_UNKNOWN)
    while "{w}" in template or "{W}" in template:
        word = invented_word(rng)
        template = template.replace("{w}", word, 1).replace("{W}", word.capitalize(), 1)
    return ask("chat", ("unknown", template), template, DO_NOT_KNOW)


def role(rng: random.Random) -> Exercise:
    """A system message that gives the model a name, or a word to begin or end every answer with."""
    make = rng.choice((_named, _framed))
    key, system, question, answer = make(rng)
    messages: tuple[Message, ...] = (
        {"role": "system", "content": system},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    )
    return Exercise("role", key, messages, is_alone=True)


def memory(rng: random.Random) -> tuple[Exercise, Exercise]:
    """Something the user tells, and a question about it that may come much later."""
    if rng.random() < 0.5:
        name = rng.choice(world.NAMES) if rng.random() < 0.7 else invented_word(rng).capitalize()
        told, reply = (
            rng.choice(("My name is {v}.", "I am {v}.", "Please call me {v}.")).format(v=name),
            f"Nice to meet you, {name}.",
        )
        asked, answer = (
            rng.choice(("What is my name?", "Who am I?", "Do you know my name?")),
            f"Your name is {name}.",
        )
        return ask("memory", ("memory", told), told, reply), ask("memory", ("memory", told), asked, answer)
    thing = rng.choice(_THINGS)
    value = rng.choice(world.GROUPS[_THING_VALUES[thing]])
    told, reply = (
        f"My favorite {thing} is {value}.",
        f"I will remember that your favorite {thing} is {value}.",
    )
    asked, answer = f"What is my favorite {thing}?", f"Your favorite {thing} is {value}."
    return ask("memory", ("memory", told), told, reply), ask("memory", ("memory", told), asked, answer)


def copying(rng: random.Random) -> Exercise:
    """Words to repeat exactly."""
    words = [
        rng.choice((invented_word(rng), rng.choice(world.NAMES), str(rng.randrange(1000))))
        for _ in range(rng.randrange(1, 6))
    ]
    text = " ".join(words)
    question = rng.choice(("Repeat: {t}", "Say: {t}", "Repeat after me: {t}", "Echo this: {t}")).format(t=text)
    return ask("copy", ("copy", text), question, text)


def reading(rng: random.Random) -> Exercise:
    """A few sentences about people, and a question that they answer."""
    people = rng.sample(world.NAMES, rng.randrange(2, 4))
    homes = dict(zip(people, rng.sample(world.CITIES, len(people)), strict=True))
    text = " ".join(f"{person} lives in {city}." for person, city in homes.items())
    person = rng.choice(people)
    if rng.random() < 0.5:
        return ask(
            "reading",
            ("reading", text),
            f"{text} Where does {person} live?",
            f"{person} lives in {homes[person]}.",
        )
    return ask(
        "reading",
        ("reading", text),
        f"{text} Who lives in {homes[person]}?",
        f"{person} lives in {homes[person]}.",
    )


def _named(rng: random.Random) -> tuple[tuple[str, ...], str, str, str]:
    name = rng.choice(world.NAMES) if rng.random() < 0.7 else invented_word(rng).capitalize()
    job = rng.choice(list(world.JOBS))
    system = f"You are {name}, {world.with_article(job)}."
    question, answer = rng.choice(
        (
            ("What is your name?", f"My name is {name}."),
            ("Who are you?", f"I am {name}, {world.with_article(job)}."),
            ("What is your job?", f"I am {world.with_article(job)}."),
            ("What do you make?", f"I make {world.JOBS[job]}."),
        )
    )
    return ("role", system, question), system, question, answer


def _framed(rng: random.Random) -> tuple[tuple[str, ...], str, str, str]:
    inner = facts.question(rng)
    word = rng.choice(("Ahoy", "Sir", "Madam", "Friend", "Captain", invented_word(rng).capitalize()))
    question, answer = inner.messages[0]["content"], inner.messages[1]["content"]
    if rng.random() < 0.5:
        return inner.key, f"Begin every answer with {word}.", question, f"{word}! {answer}"
    return inner.key, f"End every answer with {word}.", question, f"{answer} {word}!"
