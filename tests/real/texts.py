"""Texts on which real models are compared: strings to tokenize, pages to score, prompts to continue, and conversations.

The pages were written for this project, so they need no licence, and are short, so a run on two cores takes minutes."""

from __future__ import annotations

from typing import Any

_WORDS = [
    "",
    " ",
    "\n",
    "\t\ttabs",
    "  two spaces",
    "trailing   ",
    "Hello, world!",
    "hello",
    " hello",
    "HELLO",
    "don't we'll they've I'm it's",
    "1234567890",
    "3.14159",
    "2026-11-24T16:30:00Z",
    "a+b=c; d<=e",
    "naïve café – Größe",
    "Grüße aus Köln, ¿qué tal?",
    "привет мир",
    "你好,世界",
    "こんにちは世界",
    "안녕하세요 세계",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀👍🏽👩‍👩‍👧",
    "é e\u0301",
    "\u200bzero\u200dwidth",
    "\ufeffmark",
    "line\r\nline\rline\n\n\nline",
    "a" * 70,
    " " * 33,
    "-" * 40,
    "....!!!???",
    "<html><body class='x'>&amp;</body></html>",
    '{"a": [1, 2.5, null, true], "b": "\\u00e9"}',
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "SELECT name, COUNT(*) FROM users GROUP BY name;",
    "https://example.org/a/b?c=d&e=%20#f",
    "user.name+tag@example.org",
    "$100, 50%, #3, @you, ~/x, C:\\y",
    "x_1 camelCase snake_case SCREAMING_CASE kebab-case",
    "\\frac{1}{2}\\sum_{i=0}^{n} x_i",
    "ﬁ ﬂ ½ ² ™ ℃ Ⅷ",
    "ＡＢＣ１２３",
    "I\u0307stanbul ß ẞ ſ",
    "\x00\x01\x7f",
    "\u00a0no\u2003break\u3000space",
    "</s><s>[INST]<unk><pad>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
]
#: Strings for tokenizers: each also in the middle of a text.
TEXTS = [*_WORDS, *(f"see {word} there" for word in _WORDS)]

#: Words that a peer reads otherwise than the model's own tokenizer does, by the beginning of the model's name.
#: transformers reads from a GGUF file neither how smollm2 splits digits outside of ASCII, nor that gemma3's runs of
#: spaces are symbols of their own; neither peer composes characters, which qwen2.5's tokenizer does first; llama.cpp
#: takes an ordinary token of it for a special one.
NOT_IN_TRANSFORMERS = {
    "smollm2": ("½ ²",),
    "gemma3": (" " * 33,),
    "qwen2.5": ("e\u0301", "I\u0307"),
}
NOT_IN_LLAMACPP = {"qwen2.5": ("e\u0301", "I\u0307", "</s>")}

#: Pages to score: prose, code, another language, facts and numbers.
PAGES = [
    (
        "The lighthouse stood at the end of a long wall of stone. Every evening the keeper climbed its stairs, "
        "lit the lamp, and wrote down which ships had passed. One night in autumn the fog came in so quickly that "
        "he could not see the sea any more. He rang the bell until morning. When the sun rose, eleven boats lay "
        "in the harbour, and the people of the village brought him bread, apples and a new coat."
    ),
    (
        "import json\n"
        "\n"
        "\n"
        "def read_config(path):\n"
        '    """Read a configuration file and return it as a dictionary."""\n'
        '    with open(path, encoding="utf-8") as file:\n'
        "        config = json.load(file)\n"
        "    if not isinstance(config, dict):\n"
        '        raise ValueError(f"{path}: expected an object")\n'
        "    return config\n"
        "\n"
        "\n"
        "def main():\n"
        '    config = read_config("settings.json")\n'
        "    for name, value in sorted(config.items()):\n"
        '        print(f"{name} = {value}")\n'
    ),
    (
        "La bibliothèque de la ville ouvre à neuf heures. On y trouve des livres, des journaux et une grande "
        "salle de lecture. Le samedi, les enfants écoutent des contes, et leurs parents boivent un café dans le "
        "jardin. Der Eintritt ist frei, und wer möchte, kann Bücher für vier Wochen ausleihen."
    ),
    (
        "Water boils at 100 degrees Celsius at sea level and freezes at 0 degrees. The Earth goes around the Sun "
        "once a year, the Moon around the Earth about once a month. There are seven days in a week, twelve months "
        "in a year and 366 days in a leap year. The capital of France is Paris, the capital of Italy is Rome, and "
        "the capital of Japan is Tokyo."
    ),
]

#: Prompts to continue.
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was",
    "The three primary colours are",
    "To make a cup of tea,",
    "import os\n\nfor name in",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n",
]

_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
#: Conversations to render, with the tools of each.
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([{"role": "user", "content": "Hi"}], None),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Two\n\nlines  "}], None),
    (
        [
            {"role": "user", "content": "What is 1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "And <b>3</b> & 4?"},
        ],
        None,
    ),
    ([{"role": "user", "content": "Weather in Oslo?"}], [_WEATHER]),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"sky": "clear"}', "name": "weather"},
        ],
        [_WEATHER],
    ),
]
