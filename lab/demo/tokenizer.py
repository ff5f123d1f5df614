"""The demo model's tokenizer: byte-level BPE learned from the generated text, with the chat template.

Digits are always single tokens, so that sums can be learned digit by digit; the 256 bytes are all in the
vocabulary, so any text survives encoding and decoding. `<think>` and `<tool_call>` are whole tokens but not
special ones: they stay visible in decoded text, where parsers look for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lab.demo.corpus import document
from lab.demo.corpus.document import ASSISTANT, BOS, END, EOS, SYSTEM, TOOL, USER

SPECIAL_TOKENS = (BOS, EOS, END, SYSTEM, USER, ASSISTANT, TOOL)
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 3072
MAX_LENGTH = 2048
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(seed: int, num_documents: int = 30_000) -> PreTrainedTokenizerFast:
    """A tokenizer learned from generated training documents; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_documents), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in VISIBLE_TOKENS])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    return _wrap(tokenizer)


def _texts(seed: int, num_documents: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer:{seed}")
    marks = (*SPECIAL_TOKENS, *VISIBLE_TOKENS)
    for _ in range(num_documents):
        text = "".join(piece.text for piece in document(rng))
        for mark in marks:
            text = text.replace(mark, "\n")
        yield text


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[END, SYSTEM, USER, ASSISTANT, TOOL],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return wrapped
