"""The tokenizer of the demo model that sees: whole words of its questions and answers, and all bytes for other text.

Its marks are those of the text demo; a picture is `<image>` in a prompt, and becomes rows between marks of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lab.demo.corpus.document import ASSISTANT, BOS, END, EOS, SYSTEM, TOOL, USER
from lab.demo.seeing.questions import any_question, without_picture
from lab.demo.seeing.scenes import draw_scene

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = (BOS, EOS, END, SYSTEM, USER, ASSISTANT, TOOL, IMAGE, AROUND, WHOLE)
VOCAB_SIZE = 448
MAX_LENGTH = 1024
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(seed: int, num_texts: int = 6_000) -> PreTrainedTokenizerFast:
    """A tokenizer learned from questions and answers; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_texts), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[END, SYSTEM, USER, ASSISTANT, TOOL, IMAGE, AROUND, WHOLE],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    if CHAT_TEMPLATE.exists():
        wrapped.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return wrapped


def _texts(seed: int, num_texts: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer:{seed}")
    for number in range(num_texts):
        make = any_question if number % 8 else without_picture
        question = make(rng, draw_scene(rng, "train"))
        yield question.text
        yield question.answer
