"""Tests like AICI's sample scripts, rewritten in Python, over a fake model that has memorized the texts."""

from __future__ import annotations

from tests.controllers.conftest import Run
from tests.controllers.pykit import script


def test_the_first_sample_asks_for_one_word_alone(py: Run) -> None:
    """AICI's first sample asks a question and chooses one of two words by the score of each whole word; nothing is
    sampled."""
    body = """
await aici.FixedTokens("Is an orca a dolphin? Say Yes or No.\\n")
answer = await aici.gen_tokens(options=["Yes", "No"])
"""
    ran = py(script(body, call="test"), "Say Yes or No.\nYes, it is.")
    assert ran.text() == "Is an orca a dolphin? Say Yes or No.\nYes"
    assert ran.end("a").usage.sampled_tokens == 0 and ran.logs("a").endswith("TEST OK\n")


def test_take_back_one_answer(py: Run) -> None:
    body = """
await aici.FixedTokens("3+")
place = aici.Label()
await aici.FixedTokens("2")
first = await aici.gen_text(regex="=[0-9]+\\\\.")
assert (place.text_since(), first) == ("2=5.", "=5."), place.text_since()
await aici.FixedTokens("4", following=place)
second = await aici.gen_text(regex="=[0-9]+\\\\.")
assert (place.text_since(), second) == ("4=7.", "=7."), place.text_since()
"""
    ran = py(script(body, call="test"), "3+2=5. And", "3+4=7. And")
    assert (ran.error(), ran.text()) == ("", "3+4=7.")
    assert ran.end("a").usage.rewound_tokens == 4


def test_two_languages_by_forks_and_one_after_the_other(py: Run) -> None:
    lines = ('"hello" in French is "bonjour".', '"hello" in German is "hallo".')
    forks = """
await aici.FixedTokens('"hello" in ')
number = await aici.fork(3)
if number == 0:
    french, german = await aici.wait_vars("french", "german")
    await aici.FixedTokens(f"two languages: {french.decode()} {german.decode()}")
else:
    language = ["French", "German"][number - 1]
    await aici.FixedTokens(f'{language} is "')
    await aici.gen_text(stop_at='"', store_var=language.lower())
"""
    ran = py(script(forks, call="test"), *lines)
    assert ran.text() == '"hello" in two languages: bonjour" hallo"'
    assert ran.text(index=1) == lines[0][:-1] and ran.text(index=2) == lines[1][:-1]
    sequential = """
await aici.FixedTokens('"hello" in ')
place = aici.Label()
await aici.FixedTokens('French is "', following=place)
await aici.gen_text(stop_at='"', store_var="french")
await aici.FixedTokens('German is "', following=place)
await aici.gen_text(stop_at='"', store_var="german")
aici.check_vars({"french": 'bonjour"', "german": 'hallo"'})
"""
    ran = py(script(sequential, call="test"), *lines)
    assert (ran.error(), ran.text()) == ("", lines[1][:-1])


def test_variables_words_numbers_and_choices(py: Run) -> None:
    body = """
await aici.FixedTokens("The word ")
await aici.gen_tokens(regex='"[a-z]+"', store_var="word", max_tokens=30)
aici.set_var("copy", aici.get_var("word"))
await aici.FixedTokens(" comes ")
number = await aici.gen_text(regex="[0-9][.][0-9]", store_var="number")
await aici.FixedTokens(" times: ")
await aici.gen_tokens(options=["a lot", "rarely"], store_var="often")
await aici.gen_tokens(max_tokens=3)
aici.check_vars({"word": '"dog"', "copy": '"dog"', "number": "2.5", "often": "rarely"})
"""
    ran = py(script(body, call="test"), 'The word "dog" comes 2.5 times: rarely so.')
    assert (ran.error(), ran.text()) == ("", 'The word "dog" comes 2.5 times: rarely so')


def test_choices_that_come_from_the_text(py: Run) -> None:
    """A script collects items line by line, then replaces the text by a question whose options are the items."""
    body = """
begin = aici.Label()
await aici.FixedTokens("Drugs:\\n")
items = []
for _ in range(5):
    await aici.FixedTokens("- ")
    item = (await aici.gen_text(stop_at="\\n")).strip()
    if item == "END":
        break
    items.append(item)
assert items == ["aspirin", "codeine"], items
assert begin.text_since().startswith("Drugs:\\n- aspirin")
await aici.FixedTokens("Which helps? ", following=begin)
await aici.gen_text(options=items, store_var="best")
"""
    ran = py(script(body, call="test"), "Drugs:\n- aspirin\n- codeine\n- END\n", "Which helps? codeine")
    assert (ran.error(), ran.text(), ran.variables()["best"]) == ("", "Which helps? codeine", b"codeine")


def test_choices_of_which_there_are_none(py: Run) -> None:
    """The options of a question are the texts that the model marked, and it marked no text. So only the end token is
    allowed; it is not kept, and the script continues."""
    body = """
import re
begin = aici.Label()
await aici.FixedTokens("Mark each <fruit>name</fruit>: ")
marked = re.findall("<fruit>([^<]*)</fruit>", await aici.gen_text(max_tokens=30))
assert marked == [], marked
await aici.FixedTokens("Take <fruit>", following=begin)
assert await aici.gen_tokens(options=[name + "</fruit>" for name in marked], store_var="none") == []
generated = await aici.gen(options=[])
assert (generated.text, generated.reason) == ("", "end"), generated
assert await aici.choose([]) == ""
await aici.FixedTokens(" home")
"""
    ran = py(script(body, call="test"), "</fruit>: no fruit here", "Take <fruit>apple</fruit>")
    assert (ran.error(), ran.text(), ran.variables()["none"]) == ("", "Take <fruit> home", b"")
    assert ran.logs("a").count("Constraint doesn't allow any tokens; adding EOS") == 3


def test_a_joke_that_depends_on_the_answer(py: Run) -> None:
    body = """
await aici.FixedTokens("Do you want a joke or a poem? ")
answer = await aici.gen_text(options=["joke", "poem"])
if answer == "joke":
    await aici.FixedTokens("\\nWhy did the hen ")
    await aici.gen_text(stop_at="\\n", max_tokens=40)
else:
    await aici.FixedTokens("\\nRoses are red")
"""
    ran = py(script(body, call="test"), "joke or a poem? joke", "Why did the hen cross?\nTo")
    assert ran.text() == "Do you want a joke or a poem? joke\nWhy did the hen cross?\n"


def test_the_end_in_the_middle_of_a_text(py: Run) -> None:
    """The end token is sampled because no other token is allowed, and the script continues after it."""
    body = """
await aici.FixedTokens("one")
await aici.gen_tokens(regex="x?", max_tokens=5)
await aici.FixedTokens(" two")
"""
    assert py(script(body, call="test"), "one").text() == "one two"


def test_noops_between_all_kinds_of_steps(py: Run) -> None:
    body = """
prompt = await aici.GetPrompt()
await aici.Noop()
await aici.FixedTokens("ab")
await aici.Noop()
place = aici.Label()
await aici.gen_tokens(max_tokens=1)
await aici.Noop()
await aici.Noop()
number = await aici.fork(2)
await aici.Noop()
await aici.FixedTokens(str(number), following=place)
await aici.Noop()
"""
    ran = py(script(body, call="test"), "Q: abc", prompt="Q: ")
    assert [ran.text(index=i) for i in range(2)] == ["ab0", "ab1"] and not ran.error() + ran.error(index=1)


def test_take_the_prompt_back(py: Run) -> None:
    """A script's rewind may reach into the prompt."""
    body = """
class Replace(aici.NextToken):
    def mid_process(self):
        return aici.MidProcessResult.splice(2, aici.tokenize("llo"))

await Replace()
assert aici.detokenize(aici.get_tokens()) == b"hello", aici.get_tokens()
"""
    assert py(script(body, call="test"), prompt="hexx").error() == ""


def test_a_program_by_its_grammar(py: Run) -> None:
    grammar = """%start program
%%
program : statement | program statement ;
statement : NAME "=" sum ";" ;
sum : NUMBER | sum "+" NUMBER ;
NAME : "/[a-z]+/" ;
NUMBER : "/[0-9]+/" ;
SKIP : "/ +/" ;
"""
    body = f"await aici.gen_text(yacc={grammar!r}, max_tokens=17)\nawait aici.gen_text(yacc={grammar!r}, max_tokens=2)"
    ran = py(script(body, call="test"), "Q: x = 1 + 2; y = 3;", prompt="Q: ")
    assert (ran.error(), ran.text()) == ("", "x = 1 + 2; y = 3;xx") or ran.text().startswith("x = 1 + 2; y = 3;")


def test_a_quotation_then_more(py: Run) -> None:
    body = """
source = "The quick brown fox jumps over the lazy dog"
await aici.FixedTokens('It says "')
quoted = await aici.gen_text(substring=source, max_tokens=40, store_var="quote")
assert quoted == 'brown fox jumps"', quoted
await aici.gen_text(max_tokens=9)
"""
    ran = py(script(body, call="test"), 'It says "brown fox jumps" and more.')
    assert ran.text() == 'It says "brown fox jumps" and more'


def test_identifiers_from_earlier_lines(py: Run) -> None:
    body = """
lexer = aici.DynamicLexer("")
for name in ("alpha", "beta"):
    lexer.add(name)
text = await aici.gen_text(constraint=lexer.constraint, stop_at=";", max_tokens=30)
assert text == "(alpha + beta) * 2;", text
"""
    ran = py(script(body, call="test"), "Q: (alpha + beta) * 2;", prompt="Q: ")
    assert ran.error() == ""
