"""A limit on reasoning that ends with a complete sentence.

    bridle run examples/recipes/thinking.py

A hard limit would cut the reasoning in the middle of a sentence, and the answer would continue from there. Here the
sentence that exceeds the limit is rolled back, and the answer follows the last complete sentence.
"""

import pyaici.server as aici

QUESTION = "What is 23 + 45?"
BUDGET = 40  # words of thought
ANSWER = "The answer is"


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(QUESTION)
    begin = aici.Label()
    while True:
        end = aici.Label()
        part = await aici.gen(regex=r"\n?[^.!?\n]+[.!?]", max_tokens=2 * BUDGET)
        is_complete = part.text.rstrip().endswith((".", "!", "?"))
        if ANSWER in part.text or not is_complete or len(begin.text_since().split()) > BUDGET:
            break
    await aici.FixedTokens(f"\n{ANSWER}", following=end)
    await aici.gen(regex=r" \d{1,9}\.", store_var="answer")


aici.start(main())
