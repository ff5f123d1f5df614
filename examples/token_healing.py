"""A prompt that ends in the middle of a word is continued correctly.

    bridle run examples/token_healing.py --prompt "The capital of France is Pa"

Models have hardly ever seen the token " Pa" before "ris", because tokenizers split such words differently. So the last
tokens are rolled back to the beginning of the word. The model then generates tokens that spell the same text and
continue it.
"""

import re

import pyaici.server as aici

MAX_BACK = 4  # tokens


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:
        await aici.FixedTokens("The capital of France is Pa")
    word = aici.Label()
    while word.ptr > len(aici.get_tokens()) - MAX_BACK and not word.text_since().startswith(" "):
        word.ptr -= 1
    begun = word.text_since()
    await aici.FixedTokens("", following=word)
    token = aici.ConstrainedToken(lambda: aici.RegexConstraint(re.escape(begun) + r"(?s:.)*"))
    while len(word.text_since()) < len(begun):
        await token
    print(f"{begun!r} became {word.text_since()!r}")
    await aici.gen_text(stop_at=".", max_tokens=10)


aici.start(main())
