"""Chat templates that write tool calls in the formats of real models, and a class that renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from bridle.tokenizer.chat_template import ChatTemplate

_TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
_PARAMETERS = "{% for k, v in f.arguments.items() %}PARAMETER{% endfor %}"
_TEXT = "{{ v if v is string else v | tojson }}"
_TYPE = "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else 'other' }}"
_NESTED = (
    "{% macro w(v) %}{% if v is mapping %}{% for k, i in v.items() %}]<]x[>[<{{ k }}>{{ w(i) }}"
    "]<]x[>[</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for i in v %}]<]x[>[<item>{{ w(i) }}]<]x[>[</item>{% endfor %}"
    "{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
)


def _calls(call: str, before: str = "", after: str = "") -> str:
    return _TURNS.replace("CALLS", before + _EACH.replace("CALL", call) + after)


def _tagged(head: str, parameter: str, end: str, before: str = "", after: str = "") -> str:
    return _calls(head + _PARAMETERS.replace("PARAMETER", parameter) + end, before, after)


_COMMA = "{{ ', ' if not loop.last }}"
_JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'

#: Templates by what is special about them.
TEMPLATES: dict[str, str] = {
    "objects between tags": _calls(f"\n<tool_call>\n{_JSON_CALL}\n</tool_call>"),
    "a list of objects": _calls(_JSON_CALL + _COMMA, "<|calls_begin|>[", "]<|calls_end|>"),
    "objects with an id behind": _calls(
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}' + _COMMA,
        "[CALLS][",
        "]",
    ),
    "the name as key": _calls('{"{{ f.name }}": {{ f.arguments | tojson }}}' + _COMMA, "<|tools_prefix|>[", "]<|end|>"),
    "a name, an id and JSON": _calls("<|call|>{{ f.name }}<|id|>{{ c.id }}<|args|>{{ f.arguments | tojson }}"),
    "a name, a number and JSON": _calls(
        "<|call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>{{ f.arguments | tojson }}<|call_end|>",
        "<|section_begin|>",
        "<|section_end|>",
    ),
    "JSON in a fence": _calls(
        "<|call_begin|>function<|sep|>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<|call_end|>"
        "{{ '\n' if not loop.last }}",
        "<|calls_begin|>",
        "<|calls_end|>",
    ),
    "functions with parameters": _tagged(
        "\n<tool_call>\n<function={{ f.name }}>\n", "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
        "</parameter>\n", "</function>\n</tool_call>",
    ),
    "keys and values": _tagged(
        "\n<tool_call>{{ f.name }}\n",
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n",
        "</tool_call>",
    ),
    "Python's words": _tagged(
        '<function name="{{ f.name }}">',
        '<param name="{{ k }}">{{ v }}</param>',
        "</function>{{ '\n' if not loop.last }}"
    ),
    "Python's lists": _tagged(
        '<function name="{{ f.name }}">',
        '<param name="{{ k }}">{{ v | tojson if v is mapping else v }}</param>',
        "</function>{{ '\n' if not loop.last }}"
    ),
    "parameters that name their type": _tagged(
        '\n<invoke name="{{ f.name }}">\n',
        f'<parameter name="{{{{ k }}}}" type="{_TYPE}">{_TEXT}</parameter>\n',
        "</invoke>",
        "<calls>",
        "\n</calls>",
    ),
    "tags within tags": _NESTED
    + _calls(
        ']<]x[>[<invoke name="{{ f.name }}">{{ w(f.arguments) }}]<]x[>[</invoke>\n',
        "]<]x[>[<calls>\n",
        "]<]x[>[</calls>",
    ),
    "Python calls": _calls(
        "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% elif v is mapping %}"
        "{{ v | tojson }}{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}{% endfor %})" + _COMMA,
        "<|call_start|>[",
        "]<|call_end|>",
    ),
}  # fmt: skip

#: The same, with values between marks and keys without quotes.
TEMPLATES["quoted strings"] = (
    "{% macro w(v) %}{% if v is string %}<|'|>{{ v }}<|'|>{% elif v is mapping %}{ {%- for k, i in v | dictsort %}"
    "{{ k }}:{{ w(i) }}{{ ',' if not loop.last }}{% endfor %}}{% elif v is iterable %}[{% for i in v %}{{ w(i) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    + _calls("<|tool_call>call:{{ f.name }}{{ w(f.arguments) }}<tool_call|>")
)


@cache
def _chat_template(source: str) -> ChatTemplate:
    """Return the compiled template, which is cached because property tests use it many times."""
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|im_end|>"})


class CallTemplate:
    """A chat template, given as one of the sources in `TEMPLATES`."""

    def __init__(self, source: str) -> None:
        self.template = _chat_template(source)

    def render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        return self.template.render(messages, tools, None, {}, add_generation_prompt)

    def calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "") -> str:
        """Return the text that the template writes for the calls, up to the end of the turn."""
        made = [
            {"id": f"callid00{number}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for number, (name, arguments) in enumerate(calls)
        ]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": content, "tool_calls": made},
        ]
        text = self.render(messages, None, False).rpartition("<|im_start|>assistant\n")[2]
        return text.rstrip().removesuffix("<|im_end|>")


#: Python's calls in vLLM's templates, which write more or fewer quotes and commas than the models do.
_PYTHON = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ "
LOOSE_PYTHON = {
    "no quotes": _calls(_PYTHON + "'%s' | format(v) }}{{ ', ' if not loop.last }}{% endfor %})" + _COMMA, "[", "]"),
    "all in quotes": _calls(
        _PYTHON + "'\"%s\"' | format(v) }}{{ ', ' if not loop.last }}{% endfor %})" + _COMMA, "[", "]"
    ),
    "JSON without commas": _calls(_PYTHON + "v | tojson }}{% endfor %})" + _COMMA, "[", "]"),
}
