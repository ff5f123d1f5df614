"""Let the model think within a limit of tokens.

    bridle run examples/thinking_budget.py

After a number of reasoning tokens, the script itself ends the reasoning, and then the model answers. The
log-probabilities of the answer's first token show how certain the answer is.
"""

import pyaici.server as aici

BUDGET = 12  # tokens
QUESTION = "What is 23 + 45?"
ASKED = [{"role": "system", "content": "Think before you answer."}, {"role": "user", "content": QUESTION}]


async def main() -> None:
    await aici.chat(ASKED)
    await aici.FixedTokens("<think>\n")
    thoughts = await aici.gen(stop_at="</think>", max_tokens=BUDGET)
    if thoughts.reason == "max_tokens":
        print("enough thought:", repr(thoughts.text))
        await aici.FixedTokens("\n</think>")
    await aici.FixedTokens("\n\n23 + 45 = ")
    answer = await aici.gen(regex=r"\d{1,3}", top_logprobs=3)
    first = answer.candidates[0]
    print("answer:", answer.text, *(f"{seen.text!r} {seen.probability:.0%}" for seen in first))
    aici.set_var("answer", answer.text)


aici.start(main())
