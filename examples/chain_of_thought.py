"""Let the model think first, and keep only its answer.

    bridle run examples/chain_of_thought.py

The model writes its reasoning. Then everything after the question is rolled back and replaced by the answer. Readers of
the output, and requests that continue it, get only the question and the answer.
"""

import pyaici.server as aici

QUESTION = "What is 47 + 38?"
ASKED = [{"role": "system", "content": "Think before you answer."}, {"role": "user", "content": QUESTION}]


async def main() -> None:
    await aici.chat(ASKED)
    after_question = aici.Label()
    await aici.FixedTokens("<think>\n")
    work = await aici.gen_text(stop_at="</think>", max_tokens=80)
    print("work:", work.removesuffix("</think>").split("\n"))
    await aici.FixedTokens("\n\n")
    result = await aici.gen_text(regex=r"47 \+ 38 = \d+", max_tokens=20)
    answer = result.split()[-1]
    await aici.FixedTokens(f"The answer is {answer}.", following=after_question)
    aici.set_var("answer", answer)


aici.start(main())
