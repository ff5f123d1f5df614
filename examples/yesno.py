"""The model answers with one of two words, and nothing else.

    bridle run examples/yesno.py

The model reads the question and chooses one of the options; the script forces all other text. Options include their
leading spaces, so " Yes" and "Yes" are different options. After "A:" a space must come first.
"""

import pyaici.server as aici


async def main() -> None:
    await aici.FixedTokens("Q: Is Paris the capital of France?\nA:")
    answer = await aici.gen_text(options=[" Yes", " No"], store_var="answer")
    if answer == " Yes":
        await aici.FixedTokens(", it is.")
    else:
        await aici.FixedTokens(", it is not.")


aici.start(main())
