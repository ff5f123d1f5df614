"""One of two words, and nothing else.

    bridle run examples/yesno.py

The model reads the question; of its answer only the choice is its own. Each option is spelled as its own text is
spelled, so " Yes" and "Yes" are different choices: after "A:" a space comes first.
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
