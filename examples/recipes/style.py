"""A writing style that code measures, without a list of banned phrases.

    bridle run examples/recipes/style.py

The rules apply to whole sentences: few words, no long words, no two sentences with the same beginning. A sentence that
breaks a rule is rolled back and written again, at a higher temperature each time.
"""

import re

import pyaici.server as aici

QUESTION = "What is a garden?"
SENTENCES, WORDS, LETTERS, MAX_TRIES = 3, 14, 10, 8


def faults(sentence: str, before: list[str]) -> int:
    """Return the number of rules that a sentence breaks."""
    words = re.findall(r"[\w'-]+", sentence)
    first = words[0].lower() if words else ""
    return (
        (not 3 <= len(words) <= WORDS)
        + any(len(word) > LETTERS for word in words)
        + any(each.split()[0].lower() == first for each in before)
        + (not sentence.endswith((".", "!", "?")))
    )


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(QUESTION)
    written: list[str] = []
    while len(written) < SENTENCES:
        begin, tries = aici.Label(), []
        for attempt in range(MAX_TRIES):
            await aici.FixedTokens("", following=begin)
            pattern = r" ?[A-Z][^.!?\n]*[.!?]"
            sentence = await aici.gen_text(regex=pattern, max_tokens=40, temperature=0.15 * attempt)
            tries.append((faults(sentence.strip(), written), attempt, sentence))
            if tries[-1][0] == 0:
                break
        best = min(tries)[2]
        await aici.FixedTokens(best, following=begin)
        written.append(best.strip())


aici.start(main())
