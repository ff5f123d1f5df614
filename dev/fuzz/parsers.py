"""The parsers that read untrusted bytes: examples of their input, and the errors with which they may refuse an
input."""

from __future__ import annotations

import io
import json
import struct
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bridle.errors import BridleError

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """`examples` returns valid inputs. `open` returns the function that parses an input; it gets a folder for the
    parser's files. `refusals` are the errors with which the parser may refuse an input; other errors are findings."""

    examples: Callable[[], list[bytes]]
    open: Callable[[Path], Parse]
    refusals: tuple[type[Exception], ...] = (BridleError,)


def _safetensors(tensors: dict[str, list[int]]) -> bytes:
    """Return a safetensors file of float32 tensors of these shapes, all zeros."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def _gguf() -> list[bytes]:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("c"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.0, 1.0, 2.0),
    ]
    rows = [text("t") + struct.pack("<IQIQ", 1, 8, 0, 0), text("u") + struct.pack("<IQQIQ", 2, 32, 2, 2, 32)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(keys)) + b"".join(keys) + b"".join(rows)
    return [head + bytes(-len(head) % 32) + bytes(96)]


def _open_gguf(folder: Path) -> Parse:
    from bridle.gguf import open_gguf

    path = folder / "a.gguf"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        file = open_gguf(path)
        for name in file.tensors:
            file.read(name)

    return parse


_CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "eos_token_id": [1, 2]}
_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
_SITE = "base_model.model.model.layers.0.self_attn.q_proj"


def _folder_parser(folder: Path, kept: dict[str, bytes], fuzzed: str, read: Callable[[Path], object]) -> Parse:
    """Return a parser that reads a folder whose file called `fuzzed` is the input."""
    for name, data in kept.items():
        (folder / name).write_bytes(data)

    def parse(data: bytes) -> None:
        (folder / fuzzed).write_bytes(data)
        read(folder)

    return parse


def _open_checkpoint(fuzzed: str) -> Callable[[Path], Parse]:
    def opened(folder: Path) -> Parse:
        from bridle.model.checkpoint import inspect_checkpoint

        kept = {"config.json": json.dumps(_CONFIG).encode(), "model.safetensors": _safetensors({"x": [2, 4]})}
        return _folder_parser(folder, kept, fuzzed, inspect_checkpoint)

    return opened


def _adapter_weights() -> bytes:
    return _safetensors({f"{_SITE}.lora_A.weight": [2, 8], f"{_SITE}.lora_B.weight": [8, 2]})


def _open_adapter(fuzzed: str) -> Callable[[Path], Parse]:
    def opened(folder: Path) -> Parse:
        from bridle.lora.files import open_adapter

        kept = {"adapter_config.json": json.dumps(_ADAPTER).encode(), "adapter_model.safetensors": _adapter_weights()}
        return _folder_parser(folder, kept, fuzzed, open_adapter)

    return opened


_TEMPLATES = [
    b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% if loop.last %}!{% endif %}{% endfor %}",
    b"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n * 3 ** 2 }}",
    b"{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f(messages[0:1]) }}{{ 'a' * 20 }}",
    b"{{ '%d' % 3 }}{{ ''.join(['a', 'b']) }}{{ messages | map(attribute='role') | list | length }}",
    b"{%- if not messages or 'a' in messages[0] -%}{{ raise_exception('no') }}{%- endif -%}{{ messages[0].role }}",
]


def _open_template(folder: Path) -> Parse:
    from bridle.tokenizer.template_engine import ChatTemplateProgram, TemplateLimits

    limits = TemplateLimits(20_000, 100_000)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    return lambda data: ChatTemplateProgram(data.decode("utf-8", "replace"), limits).render({"messages": messages})


def _template_error() -> type[Exception]:
    from bridle.tokenizer.template_engine import TemplateError

    return TemplateError


_LMTP = [
    b'GENERATE {"stream_id": 1, "model": "m", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0.5, "top_p": 1}',
    b'SCORE {"stream_id": "a", "model": "m", "prompt": [1], "scored_prompt": [2]}',
    b'RESUME {"stream_id": 3, "key": "k", "position": 4, "model": "m", "prompt": "x", "logit_bias": {"3": -1.5}}',
]
_LMTP_ANSWERS = [
    b'TOKEN {"stream_id": 1, "token": 5, "logprob": -0.5, "finish_reason": null, "top_logprobs": {"5": -0.5}}',
    b'TOKEN [{"stream_id": 1, "token": 5, "logprob": -0.5}, {"stream_id": 1, "token": 6, "logprob": -1}]',
    b'MSG {"stream_id": 1, "error": "no", "code": "overloaded", "retryable": true, "retry_after": 1.5}',
]
_AICI = [
    b'{"op": "instantiate", "req_id": "r", "prompt": [1, 2], "module_id": "m", "module_arg": {"a": 1}, "$rid": "x"}',
    b'{"op": "mk_module", "binary": "AGFzbQEAAAA=", "$auth": {"user": "ann", "is_admin": false}}',
    b'{"op": "mid_process", "ops": [{"id": 1, "clone_id": 2, "tokens": [3], "backtrack": 1}], "freed": [4]}',
    b'{"op": "set_tags", "module_id": "m", "tags": ["a"]}',
]
_AICI_REPLIES = [
    b'{"type": "ok", "data": {"module_id": "x", "wasm_size": 4, "compiled_size": 8, "time": 3}}',
    b'{"type": "error", "error": "no", "is_user_error": true, "retry_after": 1.5}',
]


def _open_lmtp(folder: Path) -> Parse:
    from bridle.lmtp.decoding import decode_request

    return lambda data: decode_request(data.decode("utf-8", "replace"))


def _open_lmtp_answers(folder: Path) -> Parse:
    from bridle.lmtp.client_decoding import decode_answers

    return lambda data: decode_answers(data.decode("utf-8", "replace"))


def _open_aici(folder: Path) -> Parse:
    from bridle.aici import protocol

    def parse(data: bytes) -> None:
        request: Any = protocol.decode_request(data)
        protocol.auth_of(request)
        protocol.trace_of(request)

    return parse


def _open_aici_replies(folder: Path) -> Parse:
    from bridle.aici import replies

    return lambda data: replies.decode_reply(data, replies.ModuleData)


_MODULE = """(module (memory (export "memory") 1 4) (global $g (mut i32) (i32.const 1)) (table 2 funcref)
  (elem (i32.const 0) $f)
  (func $f (export "aici_init") (local i64) (global.set $g (i32.add (global.get $g) (i32.const 2))))
  (data (i32.const 0) "hello"))"""


def _modules() -> list[bytes]:
    import wasmtime

    component = '(component (core module $m (func (export "f"))) (core instance $i (instantiate $m)) (type (list u8)))'
    return [bytes(wasmtime.wat2wasm(_MODULE)), bytes(wasmtime.wat2wasm(component))]


def _open_wasm(folder: Path) -> Parse:
    from bridle.aici.runtime.compiler import compile_module
    from bridle.aici.runtime.limits import RuntimeLimits

    limits = RuntimeLimits()
    return lambda data: compile_module(data, limits)


def _pictures() -> list[bytes]:
    from PIL import Image

    picture = Image.fromarray(np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3))
    files = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        file = io.BytesIO()
        picture.save(file, kind)
        files.append(file.getvalue())
    return files


def _open_picture(folder: Path) -> Parse:
    from bridle.multimodal import MediaLimits, open_picture

    return lambda data: open_picture(data, MediaLimits())


def _sounds() -> list[bytes]:
    import soundfile

    files, samples = [], np.zeros(400, np.float32)
    for kind in ("WAV", "FLAC", "OGG"):
        file = io.BytesIO()
        soundfile.write(file, samples, 8_000, format=kind)
        files.append(file.getvalue())
    plain = io.BytesIO()
    with wave.open(plain, "wb") as out:
        out.setparams((2, 2, 8_000, 0, "NONE", ""))
        out.writeframes(bytes(800))
    return [*files, plain.getvalue()]


def _open_sound(folder: Path) -> Parse:
    from bridle.multimodal import MediaLimits
    from bridle.multimodal.audio_decoding import open_sound

    return lambda data: open_sound(data, 16_000, MediaLimits())


def _clips() -> list[bytes]:
    from PIL import Image

    frames = [Image.new("RGB", (16, 16), (40 * number, 10, 200)) for number in range(4)]
    files = []
    for kind in ("GIF", "WEBP"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=100)
        files.append(file.getvalue())
    return files


def _open_clip(folder: Path) -> Parse:
    from bridle.multimodal import MediaLimits
    from bridle.multimodal.video_decoding import open_clip

    return lambda data: open_clip(data, MediaLimits())


PARSERS: dict[str, Parser] = {
    "gguf": Parser(_gguf, _open_gguf),
    "safetensors": Parser(lambda: [_safetensors({"x": [2, 4], "y": [3]})], _open_checkpoint("model.safetensors")),
    "config": Parser(lambda: [json.dumps(_CONFIG).encode()], _open_checkpoint("config.json")),
    "adapter": Parser(lambda: [_adapter_weights()], _open_adapter("adapter_model.safetensors")),
    "adapter-config": Parser(lambda: [json.dumps(_ADAPTER).encode()], _open_adapter("adapter_config.json")),
    "template": Parser(lambda: _TEMPLATES, _open_template, (_template_error(),)),
    "lmtp": Parser(lambda: _LMTP, _open_lmtp, ()),
    "lmtp-client": Parser(lambda: _LMTP_ANSWERS, _open_lmtp_answers),
    "aici": Parser(lambda: _AICI, _open_aici, (BridleError, msgspec.DecodeError)),
    "aici-client": Parser(lambda: _AICI_REPLIES, _open_aici_replies),
    "wasm": Parser(_modules, _open_wasm),
    "image": Parser(_pictures, _open_picture),
    "sound": Parser(_sounds, _open_sound),
    "video": Parser(_clips, _open_clip),
}
