"""Chat templates that omit some parts of conversations, for tests of tools in prompts."""

from __future__ import annotations

from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_template import ChatTemplate
from tests.http.harness import tokenizer_folder

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS_TOLD = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN


def a_tokenizer(template: str) -> Tokenizer:
    text = Tokenizer.load(tokenizer_folder())
    text.chat_template = ChatTemplate(template, {})
    return text
