"""Prompts in which all tokens, including text, attend in both directions (prefix LM), such as PaliGemma's prompts with
images. Each position of a prefix-LM prompt depends on all tokens and pixels of the prompt. So the whole prompt is
handled like one image. The prompt's key covers ids and pixels, no chunk splits the prompt, and the prefix cache never
shares a part of it. Sampled tokens after the prompt attend causally.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridle.engine.multimodal.multimodal_inputs import PROMPT_IDS, MediaArray, MultiModalItem
from bridle.multimodal.processor import PlacingTokenizer


def completed(prompt: Sequence[int], placeholder: int, num_pictures: int, tokenizer: PlacingTokenizer) -> list[int]:
    """Return a prompt in the form that the processor of transformers produces. In this form, the BOS token comes after
    the last image, and a newline at the end. If the prompt has no placeholders, images come first. A prompt that
    already has this form is unchanged."""
    bos, tokens = tokenizer.bos_token_id, list(prompt)
    if placeholder not in tokens:
        tokens = [placeholder] * num_pictures + (tokens[1:] if tokens[:1] == [bos] else tokens)
    elif tokens[0] == bos:
        del tokens[0]
    split = len(tokens) - tokens[::-1].index(placeholder)
    text = tokens[split:]
    if bos is None or text[:1] == [bos]:
        return tokens
    lines = ""
    while text and is_lines(last := tokenizer.token_text(text[-1])):
        text.pop()
        lines = last + lines
    return [*tokens[:split], bos, *text, *tokenizer.encode(lines + "\n", add_special_tokens=False)]


def is_lines(text: str) -> bool:
    """Return whether a text consists only of line ends. Adjacent line ends may be one token."""
    return bool(text) and not text.strip("\n")


def whole_arrays(tokens: Sequence[int], media: Sequence[MultiModalItem]) -> tuple[MediaArray, ...]:
    """Return the arrays that determine a prompt's features: its ids, then the pixels of its images in order."""
    ids = MediaArray(PROMPT_IDS, "int64", (len(tokens),), np.asarray(tokens, np.int64).tobytes())
    return (ids, *(array for medium in media for array in medium.arrays))
