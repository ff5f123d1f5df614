"""Tests of the shipped weights: they are small, load in plain transformers, and answer a few prompts correctly."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from bridle.demo import demo_model_path

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def chat(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **options: Any) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    return complete(model, tokenizer, text)


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in demo_model_path().iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert (demo_model_path() / "model.safetensors").stat().st_size < MAX_BYTES
    assert sum(path.stat().st_size for path in demo_model_path().iterdir()) < MAX_BYTES


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("demo", "236549fb3abc3903c8f94bf7f7bfa488e3751ecdd95ed1c6f1da5a37799ff2bd"),
        ("demo-sees", "d70dbff32d806c8815a2ddad5b1f85bb978274979b183c1a2269b11b4fed9081"),
    ],
)
def test_weights_are_those_that_were_measured(name: str, digest: str) -> None:
    weights = (demo_model_path(name) / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == digest


def test_the_model_is_a_llama_of_a_few_million_parameters(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    assert model.config.max_position_embeddings >= 2048
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])


def test_the_demo_model_completes_its_sentences(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert complete(model, tokenizer, "<|bos|>The capital of France is") == " Paris.<|eos|>"
    assert complete(model, tokenizer, "<|bos|>12 + 34 =") == " 46<|eos|>"
    assert complete(model, tokenizer, "The capital of Japan is") == " Tokyo.<|eos|>"


def test_the_demo_model_answers_its_questions(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert chat(model, tokenizer, user("What is the capital of Italy?")) == "The capital of Italy is Rome.<|end|>"
    assert chat(model, tokenizer, user("Is a dog a mammal?")) == "Yes.<|end|>"
    assert chat(model, tokenizer, user("Name three fruits.")) == "apple, banana, cherry<|end|>"
    brief = {"role": "system", "content": "Answer in one word."}
    assert chat(model, tokenizer, brief, user("What is the opposite of hot?")) == "cold<|end|>"


def test_a_tool_call_and_the_answer_from_its_result(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    asked = user("What is the weather in Oslo?")
    expected = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|end|>'
    assert chat(model, tokenizer, asked, tools=tools) == expected
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": '{"sky": "sunny", "temperature": 21}'}
    answer = chat(model, tokenizer, asked, called, result, tools=tools)
    assert answer == "It is sunny in Oslo, at 21 degrees.<|end|>"


def test_the_demo_model_thinks_before_it_answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    written = chat(model, tokenizer, user("What is 27 + 35?"), enable_thinking=True)
    assert written == "<think>\nones: 7 + 5 = 12\ntens: 2 + 3 + 1 = 6\n</think>\n\n27 + 35 = 62<|end|>"


def test_a_name_is_remembered_across_most_of_the_context(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [user("My name is Clara."), {"role": "assistant", "content": "Nice to meet you, Clara."}]
    while len(tokenizer.apply_chat_template(messages)["input_ids"]) < 1700:
        messages += [
            user("What is the capital of Spain?"),
            {"role": "assistant", "content": "The capital of Spain is Madrid."},
        ]
    assert chat(model, tokenizer, *messages, user("What is my name?")) == "Your name is Clara.<|end|>"
