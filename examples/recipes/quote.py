"""Verbatim quotations, with their positions in the source.

    bridle run examples/recipes/quote.py

The model can write only a passage of the article. A few words identify the sentence. The script replaces these words by
the whole sentence, and stores where the sentence begins and ends in the article.
"""

import json
import re

import pyaici.server as aici

ARTICLE = (
    "Oslo is the capital of Norway. It lies at the end of a fjord. The city burned down in 1624 and was built again. "
    "About 700,000 people live there."
)
QUESTION = "How many people live in Oslo?"
LEAD = 'The text says: "'
NUM_TOKENS = 8


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(f"{ARTICLE}\n\n{QUESTION} Answer with the sentence that says so.")
    begin = aici.Label()
    await aici.FixedTokens(LEAD)
    words = await aici.gen_text(substring=ARTICLE, max_tokens=NUM_TOKENS)
    place = ARTICLE.find(words.strip(' "'))
    sentence = next(each for each in re.finditer(r"\S.*?[.!?](?=\s|$)", ARTICLE) if each.end() > place)
    await aici.FixedTokens(sentence[0], following=begin)
    aici.set_var("quote", json.dumps({"text": sentence[0], "begin": sentence.start(), "end": sentence.end()}))


aici.start(main())
