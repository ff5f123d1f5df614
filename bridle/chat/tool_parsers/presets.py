"""Formats of tool calls, under the names that their parsers have in vLLM, SGLang and llama.cpp.

Each value equals the format that is inferred from the chat template of its models. A preset is for models whose
template shows no calls, or for fine-tuned models that write another format than their template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from bridle.chat.tool_parsers.call_format import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    CallFormat,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    parse_format,
)
from bridle.errors import InvalidRequest

#: Formats with their own readers.
Own = Literal["mistral", "harmony"]
_MAX_FILE = 64 << 10


def _objects(
    opening: str, closing: str, between: str = ", ", keys: tuple[str, str] = ("name", "arguments")
) -> CallFormat:
    """Return a format whose calls are a list of JSON objects."""
    call = (f'{{"{keys[0]}": "', NAME, f'", "{keys[1]}": ', ARGUMENTS, "}")
    return CallFormat(call, JsonArguments(), opening, closing, between, *keys, source="preset")


def _object(opening: str, closing: str, between: str = "", keys: tuple[str, str] = ("name", "arguments")) -> CallFormat:
    """Return a format whose calls are JSON objects, each between marks."""
    call = (f'{opening}{{"{keys[0]}": "', NAME, f'", "{keys[1]}": ', ARGUMENTS, f"}}{closing}")
    return CallFormat(call, JsonArguments(), "", "", between, *keys, source="preset")


def _named(*call: str, section: tuple[str, str] = ("", ""), between: str = "") -> CallFormat:
    """Return a format with names in marks, and arguments as JSON."""
    return CallFormat(call, JsonArguments(), *section, between, source="preset")


def _tagged(
    head: tuple[str, ...],
    end: str,
    parameter: tuple[str, str | dict[str, str], str],
    section: tuple[str, str] = ("", ""),
    between: str = "",
    literals: str = "json",
    is_nested: bool = False,
) -> CallFormat:
    """Return a format with names in tags, and tagged arguments."""
    opening, middle, closing = parameter
    middles = middle if isinstance(middle, dict) else {"any": middle}
    tags = TaggedArguments(opening, middles, closing, literals=literals, is_nested=is_nested)
    return CallFormat((*head, ARGUMENTS, end), tags, *section, between, source="preset")


def _deepseek_xml(section: str) -> CallFormat:
    parameter = ('\n<｜DSML｜parameter name="', {"string": '" string="true">', "any": '" string="false">'})
    return _tagged(
        ('\n<｜DSML｜invoke name="', NAME, '">'),
        "\n</｜DSML｜invoke>",
        (*parameter, "</｜DSML｜parameter>"),
        (f"<｜DSML｜{section}>", f"\n</｜DSML｜{section}>"),
    )


_KIMI = ("<|tool_call_begin|>functions.", NAME, ":", INDEX, "<|tool_call_argument_begin|>", ARGUMENTS)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_M3 = "]<]minimax[>["

#: Formats by their names.
PRESETS: dict[str, CallFormat] = {
    "apertus": CallFormat(
        ('{"', NAME, '": ', ARGUMENTS, "}"),
        JsonArguments(),
        "<|tools_prefix|>[",
        "]<|tools_suffix|>",
        ", ",
        name_key="",
        arguments_key="",
        source="preset",
    ),
    "cohere_command": CallFormat(
        ('\n    {"tool_call_id": "', INDEX, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        JsonArguments(),
        "<|START_ACTION|>[",
        "\n]<|END_ACTION|>",
        ",",
        "tool_name",
        "parameters",
        source="preset",
    ),
    "deepseek_v3": _named(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        NAME,
        "\n```json\n",
        ARGUMENTS,
        "\n```<｜tool▁call▁end｜>",
        section=_DEEPSEEK,
        between="\n",
    ),
    "deepseek_v31": _named(
        "<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>", section=_DEEPSEEK
    ),
    "deepseek_v32": _deepseek_xml("function_calls"),
    "deepseek_v4": _deepseek_xml("tool_calls"),
    "functionary_v3_1": _named("<function=", NAME, ">", ARGUMENTS, "</function>"),
    "gemma4": CallFormat(
        ("<|tool_call>call:", NAME, "{", ARGUMENTS, "}<tool_call|>"), QuotedArguments('<|"|>'), source="preset"
    ),
    "gigachat3": CallFormat(
        ('<|function_call|>{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        JsonArguments(),
        name_key="name",
        max_calls=1,
        source="preset",
    ),
    "glm45": _tagged(
        ("<tool_call>", NAME),
        "\n</tool_call>",
        ("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        between="\n",
    ),
    "glm47": _tagged(("<tool_call>", NAME), "</tool_call>", ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
    "granite": _objects("<|tool_call|>[", "]"),
    "hermes": _object("<tool_call>\n", "\n</tool_call>", "\n"),
    "internlm": _object("<|action_start|><|plugin|>\n", "<|action_end|>\n", keys=("name", "parameters")),
    "jamba": _objects("<tool_calls>[", "]</tool_calls>"),
    "kimi_k2": _named(
        *_KIMI, "<|tool_call_end|>", section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    ),
    "lfm2": CallFormat(
        (NAME, "(", ARGUMENTS, ")"),
        PythonArguments(),
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
        source="preset",
    ),
    "llama3_json": CallFormat(
        ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        JsonArguments(),
        separator="; ",
        name_key="name",
        arguments_key="parameters",
        is_bare=True,
        source="preset",
    ),
    "llama4_pythonic": CallFormat(
        (NAME, "(", ARGUMENTS, ")"), PythonArguments(), "<|python_start|>[", "]<|python_end|>", ", ", source="preset"
    ),
    "longcat": _object("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
    "minimax": CallFormat(
        ('\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        JsonArguments(),
        "<tool_calls>",
        "\n</tool_calls>",
        name_key="name",
        source="preset",
    ),
    "minimax_m2": _tagged(
        ('\n<invoke name="', NAME, '">'),
        "\n</invoke>",
        ('\n<parameter name="', '">', "</parameter>"),
        ("<minimax:tool_call>", "\n</minimax:tool_call>"),
    ),
    "minimax_m3": _tagged(
        (f'\n{_M3}<invoke name="', NAME, '">'),
        f"{_M3}</invoke>",
        (f"{_M3}<", ">", f"{_M3}</{{key}}>"),
        (f"{_M3}<tool_call>", f"\n{_M3}</tool_call>"),
        is_nested=True,
    ),
    "nemotron_v2": _objects("<TOOLCALL>[", "]</TOOLCALL>"),
    "phi4_mini_json": _objects("functools[", "]"),
    "pythonic": CallFormat(
        (NAME, "(", ARGUMENTS, ")"), PythonArguments(), "[", "]", ", ", is_bare=True, source="preset"
    ),
    "qwen3_coder": _tagged(
        ("<tool_call>\n<function=", NAME, ">"),
        "\n</function>\n</tool_call>",
        ("\n<parameter=", ">\n", "\n</parameter>"),
        between="\n",
        literals="mixed",
    ),
    "seed_oss": _tagged(
        ("<seed:tool_call>\n<function=", NAME, ">"),
        "\n</function>\n</seed:tool_call>",
        ("\n<parameter=", ">", "</parameter>"),
        between="\n",
        literals="python",
    ),
    "xlam": CallFormat(
        ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        JsonArguments(),
        "[",
        "]",
        ", ",
        name_key="name",
        is_bare=True,
        source="preset",
    ),
    "solar_open": _named(
        "<|tool_call:begin|>",
        ID,
        "<|tool_call:name|>",
        NAME,
        "<|tool_call:args|>",
        ARGUMENTS,
        "<|tool_call:end|>",
        section=("<|tool_calls|>", "<|calls|>"),
    ),
}
OWN: tuple[Own, ...] = ("mistral", "harmony")
#: Names of parsers for one model, whose template shows its calls; the format is inferred from the template.
FROM_TEMPLATE = frozenset(
    (
        *("auto", "functiongemma", "granite-20b-fc", "hy_v3", "inkling", "kimi_k3", "minicpm5", "olmo3"),
        *("poolside_v1", "solar_open2", "step3", "trinity"),
    )
)
#: Names of reasoning parsers for one model; the tags are inferred from the template.
TAGS_FROM_TEMPLATE = frozenset(("auto", "granite", "inkling", "kimi_k3", "solar_open2"))
#: Alternative names of formats.
ALIASES = {
    **dict.fromkeys(("qwen", "qwen25", "qwen3", "granite4", "ernie45", "bielik", "mimo"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("openai", "gpt-oss", "gpt_oss", "gptoss"), "harmony"),
    **dict.fromkeys(("qwen3_xml", "qwen3coder", "qwen3_coder_xml", "step3p5", "nemotron_v3"), "qwen3_coder"),
    **dict.fromkeys(("apriel", "hunyuan_a13b", "hunyuan"), "jamba"),
    **dict.fromkeys(("deepseekv3", "deepseek_r1"), "deepseek_v3"),
    **dict.fromkeys(("command_r7b", "cohere_command3", "cohere_command4", "cohere"), "cohere_command"),
    **dict.fromkeys(("glm", "glm4_moe"), "glm45"),
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "apertus2509": "apertus",
    "interns1": "internlm",
    "functionary": "functionary_v3_1",
    "kimi": "kimi_k2",
    "minimax-m2": "minimax_m2",
}


def preset_or_file(name: str) -> CallFormat | Own:
    """Return the format with this name, or the format in a JSON file. Raises `InvalidRequest`."""
    name = name.strip()
    known = ALIASES.get(name, name)
    own = next((each for each in OWN if each == known), None)
    if own is not None:
        return own
    if known in PRESETS:
        return PRESETS[known]
    if name.endswith(".json"):
        return _of_file(Path(name).expanduser())
    names = ", ".join(sorted((*OWN, *PRESETS, *ALIASES, *FROM_TEMPLATE)))
    raise InvalidRequest(f"tool_format is {name[:80]!r}; must be a .json file or one of {names}", "tool_format")


def _of_file(path: Path) -> CallFormat:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise InvalidRequest(f"tool_format: {path} has more than {_MAX_FILE} bytes; shorten it", "tool_format")
        return msgspec.structs.replace(parse_format(msgspec.json.decode(data)), source="file")
    except OSError as error:
        raise InvalidRequest(f"tool_format: {path} cannot be read: {error.strerror}", "tool_format") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"tool_format: {path} is not JSON: {error}", "tool_format") from None


def name_of(form: CallFormat) -> str:
    """Return the name of a format; `inferred` or `file` for a format without a name."""
    plain = msgspec.structs.replace(form, source="preset")
    named = next((name for name, preset in PRESETS.items() if preset == plain), None)
    return named or ("file" if form.source == "file" else "inferred")


# -- reasoning -------------------------------------------------------------------------------------------------

_THINK = ("<think>", "</think>", "", "")
#: Tags around reasoning, and marks around the answer, by the names of parsers.
REASONING: dict[str, tuple[str, str, str, str] | None] = {
    "none": None,
    **dict.fromkeys(
        (
            *(
                "deepseek",
                "deepseek_r1",
                "deepseek_v3",
                "deepseek-r1",
                "deepseek-v3",
                "qwen3",
                "qwen3-thinking",
                "glm45",
            ),
            *(
                "kimi_k2",
                "minimax_m2",
                "step3",
                "nemotron_3",
                "nemotron_v3",
                "ernie45",
                "holo2",
                "hunyuan_a13b",
                "olmo3",
            ),
            *("deepseek_v4", "deepseek-v4", "glm47", "hunyuan", "interns1", "mimo", "minimax", "minimax-append-think"),
            *("minimax_m2_append_think", "nano_v3", "poolside_v1", "step3p5"),
        ),
        _THINK,
    ),
    "mistral": ("[THINK]", "[/THINK]", "", ""),
    "seed_oss": ("<seed:think>", "</seed:think>", "", ""),
    "minimax_m3": ("<mm:think>", "</mm:think>", "", ""),
    "hy_v3": ("<think:opensource>", "</think:opensource>", "", ""),
    "kimi": ("◁think▷", "◁/think▷", "", ""),
    **dict.fromkeys(
        ("cohere_command", "cohere_command3", "cohere_command4"),
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "gemma4": ("<|channel>thought", "<channel|>", "", ""),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "", ""),
    **dict.fromkeys(("harmony", "gptoss", "gpt-oss", "openai_gptoss")),  # channels are always parsed
}


def reasoning_tags(name: str) -> tuple[str, str, str, str] | None:
    """Return the tags of a reasoning format; None for `none`. Raises `InvalidRequest`."""
    if name not in REASONING:
        known = ", ".join(sorted((*REASONING, *TAGS_FROM_TEMPLATE)))
        raise InvalidRequest(f"reasoning_format is {name[:80]!r}; must be one of {known}", "reasoning_format")
    return REASONING[name]


def check_names(tool_format: str, reasoning_format: str) -> None:
    """Raise `InvalidRequest` for unknown formats, and for files without a valid format."""
    if tool_format not in FROM_TEMPLATE:
        preset_or_file(tool_format)
    if reasoning_format not in TAGS_FROM_TEMPLATE:
        reasoning_tags(reasoning_format)
