"""The start tokens of an empty prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

#: A token between training documents. Models without a start token have seen it before texts.
_BETWEEN = "<|endoftext|>"


def start_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before any text. If there are none, return the start token, unless it
    is a mark of the chat template; else the token between documents, or a space."""
    always = tuple(tokenizer.encode(""))
    if always:
        return always
    bos, between = tokenizer.bos_token_id, tokenizer.id_of(_BETWEEN)
    if bos is not None and not _is_chat_mark(tokenizer, tokenizer.token_text(bos)):
        return (bos,)
    if between is not None and between in tokenizer.special_token_ids:
        return (between,)
    return tuple(tokenizer.encode(" "))


def _is_chat_mark(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the chat template writes the token before each message, as some models write `<|im_start|>`."""
    if not tokenizer.chat_template.is_present:
        return False
    said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    try:
        return tokenizer.chat_template.render(said, None, None, {}).count(text) > 1
    except (InvalidRequest, UnsupportedModel):
        return False
