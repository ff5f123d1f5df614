"""A function that compiles and passes its examples: a tool runs it, and an error rolls the text back to the line that
failed.

    bridle serve demo --tools examples/recipes/tools.toml
    bridle run examples/recipes/code.py

The tool compiles the program and runs the examples in its docstring, in a separate process with limits. The line with
the error is generated again, and so is everything after it. A wrong result belongs to no line, so the whole body of the
function is generated again. If no attempt passes, the first attempt is kept, because the example may be wrong.
"""

import pyaici.server as aici

PROGRAM = '''def last_two(word: str) -> str:
    """The last two letters of a word.

    >>> last_two("abc")
    'bc'
    """
'''
MAX_TRIES = 6


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(f"Complete this function in Python.\n\n```python\n{PROGRAM}```")
    await aici.FixedTokens(f"```python\n{PROGRAM}")
    begin, kept, first = aici.Label(), "", ""
    for attempt in range(MAX_TRIES):
        await aici.FixedTokens(kept, following=begin)
        heat = 0.6 if attempt else 0.0
        # A small model may end the code block at once: the first line is required.
        line = await aici.gen(regex=r"\n*    [^\n]+\n", max_tokens=60, temperature=heat)
        rest = line.text + await aici.gen_text(stop_at="```", max_tokens=300, temperature=heat)
        first = first or rest
        code = PROGRAM + (kept + rest).partition("```")[0]
        result = await aici.tool("python", {"code": code}).json()
        if result["error"] is None:
            break
        print(f"line {result['line']}: {result['error']}")
        given, wrong = PROGRAM.count("\n"), (result["line"] or 1) - 1
        kept = "".join(code.splitlines(keepends=True)[given:wrong])
    else:
        await aici.FixedTokens(first, following=begin)


aici.start(main())
