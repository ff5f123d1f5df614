"""Benchmark of choices between options: `python -m dev.bench.choices MODEL`.

The benchmark has 200 questions with four options each, from tables of facts. To find the exact answer, each option is
scored alone as the end of a prompt, and the most probable option is chosen. The exact answer is compared with the
choice of `LLM.decide`, and with token-by-token sampling under a mask. Wrong answers of the model itself do not count as
errors. A choice counts as correct if it is the model's most probable option.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle import LLM
from bridle.outputs import RequestOutput
from bridle.structured_output import Choice
from bridle.structured_output.vocabulary import vocabulary_of

NUM_QUESTIONS = 200
#: Facts: a subject and its answer in each entry; entries are separated by slashes; `_` is a space.
_CAPITALS = """Italy Rome/France Paris/Spain Madrid/Germany Berlin/Austria Vienna/Poland Warsaw/Greece Athens/Portugal
Lisbon/Ireland Dublin/Norway Oslo/Sweden Stockholm/Finland Helsinki/Denmark Copenhagen/Hungary Budapest/Romania
Bucharest/Bulgaria Sofia/Ukraine Kyiv/Russia Moscow/Turkey Ankara/Egypt Cairo/Kenya Nairobi/Nigeria Abuja/Ghana
Accra/Ethiopia Addis_Ababa/Morocco Rabat/Tunisia Tunis/Algeria Algiers/Japan Tokyo/China Beijing/India New_Delhi/Nepal
Kathmandu/Thailand Bangkok/Vietnam Hanoi/Indonesia Jakarta/Philippines Manila/Iran Tehran/Iraq Baghdad/Canada
Ottawa/Mexico Mexico_City/Cuba Havana/Peru Lima/Chile Santiago/Argentina Buenos_Aires/Brazil Brasilia/Colombia
Bogota/Venezuela Caracas/Bolivia La_Paz/Ecuador Quito/Uruguay Montevideo/Australia Canberra"""
_SYMBOLS = """H hydrogen/He helium/Li lithium/C carbon/N nitrogen/O oxygen/F fluorine/Ne neon/Na sodium/Mg magnesium/Al
aluminium/Si silicon/P phosphorus/S sulfur/Cl chlorine/Ar argon/K potassium/Ca calcium/Ti titanium/Cr chromium/Fe
iron/Ni nickel/Cu copper/Zn zinc/Ag silver/Sn tin/Au gold/Hg mercury/Pb lead/U uranium"""
_AUTHORS = """Hamlet William_Shakespeare/Faust Johann_Wolfgang_von_Goethe/Ulysses James_Joyce/Emma Jane_Austen/Dracula
Bram_Stoker/Frankenstein Mary_Shelley/Dubliners James_Joyce/Walden Henry_David_Thoreau/Candide Voltaire/Persuasion
Jane_Austen/1984 George_Orwell/Macbeth William_Shakespeare/Moby-Dick Herman_Melville/Middlemarch
George_Eliot/Utopia Thomas_More/Leviathan Thomas_Hobbes/Othello William_Shakespeare/Kim Rudyard_Kipling/Rebecca
Daphne_du_Maurier/Lolita Vladimir_Nabokov"""
_TABLES = (
    ("What is the capital of {}?", _CAPITALS),
    ("Which chemical element has the symbol {}?", _SYMBOLS),
    ("Who wrote {}?", _AUTHORS),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its options, of which the first is right."""

    text: str
    options: tuple[str, ...]


def questions() -> list[Question]:
    """Return the same questions in each call: all facts, repeated with other wrong options until there are enough
    questions."""
    rng, found = random.Random(0), list[Question]()
    while len(found) < NUM_QUESTIONS:
        found += [question for how, table in _TABLES for question in _asked(how, table, rng)]
    return found[:NUM_QUESTIONS]


def _asked(how: str, table: str, rng: random.Random) -> Iterator[Question]:
    facts = [entry.split() for entry in " ".join(table.split()).replace("/ ", "/").split("/")]
    answers = [answer.replace("_", " ") for _, answer in facts]
    for (thing, _), answer in zip(facts, answers, strict=True):
        wrong = sorted(set(answers) - {answer})
        yield Question(how.format(thing), (answer, *rng.sample(wrong, 3)))


def compare(path: str) -> dict[str, Any]:
    """Return for each method the share of choices that agree with the exact answers, the share of right choices, and
    the seconds."""
    same, right, seconds = dict.fromkeys(("scored", "masked"), 0), dict.fromkeys(("exact", "scored", "masked"), 0), {}
    asked = questions()
    with LLM(path, max_model_len=1024) as llm:
        chats = [[{"role": "user", "content": question.text}] for question in asked]
        chosen: dict[str, list[str]] = {}
        for name, scored in (("scored", None), ("masked", False)):
            began = time.perf_counter()
            forms = [Choice(question.options, scored=scored) for question in asked]
            outputs = [
                llm.chat(chat, temperature=0.0, constraint=form, use_tqdm=False)[0]
                for chat, form in zip(chats, forms, strict=True)
            ]
            seconds[name] = round(time.perf_counter() - began, 1)
            chosen[name] = [output.text for output in outputs]
        chosen["exact"] = _exact(llm, [output.prompt_token_ids for output in outputs], asked)
    for number, question in enumerate(asked):
        for name in right:
            right[name] += chosen[name][number] == question.options[0]
        for name in same:
            same[name] += chosen[name][number] == chosen["exact"][number]
    return {"model": Path(path).stem, "questions": len(asked), "agree": same, "right": right, "seconds": seconds}


def _exact(llm: LLM, prompts: list[list[int]], asked: list[Question]) -> list[str]:
    """Return the most probable option of each question; each option is scored alone after the question's prompt."""
    vocabulary = vocabulary_of(llm.tokenizer, llm.tokenizer.vocab_size)
    found = []
    paths = [tuple(vocabulary.encode(option.encode())) for question in asked for option in question.options]
    starts = [prompt for prompt, question in zip(prompts, asked, strict=True) for _ in question.options]
    whole = [[*start, *path] for start, path in zip(starts, paths, strict=True)]
    outputs = iter(llm.generate(whole, max_tokens=0, prompt_logprobs=0, use_tqdm=False))
    for prompt, question in zip(prompts, asked, strict=True):
        scores = [_total(next(outputs), len(prompt)) for _ in question.options]
        found.append(question.options[scores.index(max(scores))])
    return found


def _total(output: RequestOutput, num_prompt: int) -> float:
    """Return the log-probability of the tokens after the first `num_prompt` ones."""
    entries = (output.prompt_logprobs or [])[num_prompt:]
    return math.fsum(entry.logprob for entry in entries if entry is not None)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(compare(each)))
