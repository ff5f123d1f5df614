"""Run with the genuine `text-generation` client; the argument is a server's address. Fails if anything is off."""

import sys

from text_generation import Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message

client = Client(sys.argv[1], timeout=60)
PROMPT = "The capital of France is"


def check_generate() -> None:
    answer = client.generate(PROMPT, max_new_tokens=8, top_n_tokens=2, decoder_input_details=True)
    details = answer.details
    assert answer.generated_text == " Paris.", answer
    assert details.finish_reason == "eos_token" and details.generated_tokens == len(details.tokens)
    assert details.prefill[0].logprob is None and len(details.top_tokens[0]) == 2 and details.seed is None


def check_stream() -> None:
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert "".join(event.token.text for event in events if not event.token.special) == " Paris."
    assert events[-1].generated_text == " Paris." and events[-1].details.finish_reason == "eos_token"


def check_sampling() -> None:
    fields = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "typical_p": 0.9}
    first = client.generate("Once upon a time", seed=7, **fields)
    again = client.generate("Once upon a time", seed=7, **fields)
    assert first.generated_text == again.generated_text and first.details.seed == 7
    marked = client.generate("Once upon a time", watermark=True, repetition_penalty=1.2, seed=7, **fields)
    assert marked.generated_text
    best = client.generate("Once upon a time", best_of=2, **fields)
    assert len(best.details.best_of_sequences) == 1


def check_stop() -> None:
    answer = client.generate("Once upon a time", max_new_tokens=60, stop_sequences=["."])
    assert answer.details.finish_reason == "stop_sequence" and answer.generated_text.endswith(".")
    assert answer.generated_text.count(".") == 1
    cut = client.generate("Once upon a time", max_new_tokens=5, truncate=2, return_full_text=True)
    assert cut.details.finish_reason == "length" and cut.generated_text.startswith("Once upon a time")


def check_grammar() -> None:
    grammar = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    assert client.generate("A number:", max_new_tokens=10, grammar=grammar).generated_text.strip().isdigit()


def check_chat() -> None:
    answer = client.chat([Message(role="user", content="Is snow white?")], max_tokens=10)
    assert answer.choices[0].message.content.startswith("Yes"), answer


def check_errors() -> None:
    for call in (client.generate, lambda *a, **k: list(client.generate_stream(*a, **k))):
        try:
            call("x", max_new_tokens=1_000_000)
        except ValidationError as error:
            refusal = str(error)
        else:
            raise AssertionError("nothing was refused")
        assert "1000000" in refusal, refusal


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
