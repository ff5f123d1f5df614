"""Tests of formats by name and from files: each named format parses its models' output, and each format option accepts
a name or a file."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM
from bridle.chat.chat_format import chat_format, summary
from bridle.chat.reasoning import tags_of
from bridle.chat.stream_deltas import CallRules, ParsedMessage, ToolReader
from bridle.chat.tool_parsers.call_format import to_dict
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.call_reader import CallFormatReader
from bridle.chat.tool_parsers.formats import InferredFormat, described, format_of
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.inference import infer_format
from bridle.chat.tool_parsers.mistral import Mistral
from bridle.chat.tool_parsers.presets import ALIASES, OWN, PRESETS, check_names, name_of, preset_or_file
from bridle.cli.options import ModelOptions
from bridle.errors import InvalidRequest
from bridle.structured_output.grammar import grammar_of
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from bridle.tokenizer.chat_template import ChatTemplate
from tests.http.harness import local_client, saying, scripted_model, tokenizer, tokenizer_folder

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
RULES = CallRules(frozenset({"f", "g"}), True, {"f": SCHEMA, "g": SCHEMA})
_JSON = '{"name": "f", "arguments": {"city": "Rome", "days": 3}}'
_ARGS = '{"city": "Rome", "days": 3}'
_M3 = "]<]minimax[>["
#: A call of f as models of each format write it.
SAID = {
    "apertus": f'<|tools_prefix|>[{{"f": {_ARGS}}}]<|tools_suffix|>',
    "cohere_command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": ' + _ARGS
    + "}\n]<|END_ACTION|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" + _ARGS
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{_ARGS}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "functionary_v3_1": f"<function=f>{_ARGS}</function>",
    "gemma4": '<|tool_call>call:f{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
    "gigachat3": f"<|function_call|>{_JSON}",
    "glm45": "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>",
    "granite": f"<|tool_call|>[{_JSON}]",
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "llama3_json": f'{{"name": "f", "parameters": {_ARGS}}}',
    "pythonic": '[f(city="Rome", days=3)]',
    "xlam": f"[{_JSON}]",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "f", "parameters": {_ARGS}}}<|action_end|>',
    "jamba": f"<tool_calls>[{_JSON}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" + _ARGS
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[f(city="Rome", days=3)]<|tool_call_end|>',
    "llama4_pythonic": "<|python_start|>[f(city='Rome', days=3)]<|python_end|>",
    "longcat": f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>",
    "minimax": f"<tool_calls>\n{_JSON}\n</tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{_M3}<tool_call>\n{_M3}<invoke name="f">{_M3}<city>Rome{_M3}</city>{_M3}<days>3{_M3}</days>'
    f"{_M3}</invoke>\n{_M3}</tool_call>",
    "nemotron_v2": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "phi4_mini_json": f"functools[{_JSON}]",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=city>Rome</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>" + _ARGS
    + "<|tool_call:end|><|calls|>",
    **{
        f"deepseek_{version}": f'<｜DSML｜{section}>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" '
        'string="true">Rome</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n"
        f"</｜DSML｜{section}>"
        for version, section in (("v32", "function_calls"), ("v4", "tool_calls"))
    },
}  # fmt: skip
#: Formats in which markup begins calls.
MARKED = [name for name in PRESETS if not PRESETS[name].is_bare]
CALL = ("f", {"city": "Rome", "days": 3})


def read(reader: ToolReader, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    found = ParsedMessage()
    for position, piece in enumerate(pieces):
        found.add(reader.push(piece, is_last=position == len(pieces) - 1))
    return found.content.strip(), [(call.name, json.loads(call.arguments)) for call in found.calls]


def test_every_format_has_a_sample() -> None:
    assert set(SAID) == set(PRESETS)
    assert set(ALIASES.values()) <= {*PRESETS, *OWN}
    assert not set(ALIASES) & {*PRESETS, *OWN}


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_format_reads_what_its_models_write(name: str) -> None:
    for text in (SAID[name], *(["Let me see. " + SAID[name]] if name in MARKED else [])):
        for pieces in ([text], list(text)):
            content, calls = read(CallFormatReader(PRESETS[name], RULES), pieces)
            assert (content, calls) == (text.removesuffix(SAID[name]).strip(), [CALL])


@pytest.mark.parametrize("name", PRESETS)
def test_markup_that_is_cut_off_after_a_call_is_no_content(name: str) -> None:
    said = SAID[name]
    for length in range(1, len(said)):
        found = ParsedMessage().add(CallFormatReader(PRESETS[name], RULES).push(said[:length], is_last=True))
        assert not (found.calls and found.content.strip()), said[:length]


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_format_has_grammars(name: str) -> None:
    grammar = CallGrammar(PRESETS[name], {})
    for text in (grammar.must_call([Function("f", SCHEMA)], 2), grammar.may_call([Function("f", SCHEMA)])):
        grammar_of(Form(text, False).constraint())


def test_a_template_of_the_same_format_has_its_name() -> None:
    each = "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    value = "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
    calls = f"{{% for c in m.tool_calls %}}<tool_call>{{{{ c.function.name }}}}{each}{value}</tool_call>{{% endfor %}}"
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}" + calls + "<|im_end|>\n"
    template = ChatTemplate("{% for m in messages %}" + turn + "{% endfor %}", {})
    form = infer_format(lambda said, tools, adds: template.render(said, tools, None, {}, adds), ("<|im_end|>",))
    assert form is not None
    assert name_of(form) == "glm47"


# -- what may be named -------------------------------------------------------------------------------------------


def test_names_of_other_servers_are_known() -> None:
    for alias in (*OWN, *ALIASES):
        assert preset_or_file(alias) == preset_or_file(ALIASES.get(alias, alias)), alias


#: Names of parsers in vLLM and SGLang.
CALL_PARSERS = """
    deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45 glm47 granite-20b-fc
    granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 llama3_json llama4_json
    llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 openai phi4_mini_json pythonic qwen3_coder
    qwen3_xml seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma gemma4 apertus solar_open2
    apertus2509 deepseekv3 deepseekv31 deepseekv32 deepseekv4 glm gpt-oss llama3 qwen qwen25 minimax-m2 trinity interns1
"""
THOUGHT_PARSERS = """
    deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 glm47
    openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 mimo minimax_m2 minimax_m2_append_think minimax_m3
    mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 inkling solar_open2
    deepseek-r1 deepseek-v3 deepseek-v4 hunyuan gpt-oss kimi qwen3-thinking minimax minimax-append-think nemotron_3
    nano_v3 interns1 deepseek none auto
"""


def test_parsers_of_calls_are_known_by_name() -> None:
    for name in CALL_PARSERS.split():
        check_names(name, "auto")
        found = described(fresh(tool_format=name)) if name not in ("openai", "gpt-oss") else {}
        assert found.get("name") != "unknown", name  # left to the template, or the format of that name


def test_parsers_of_reasoning_are_known_by_name() -> None:
    for name in THOUGHT_PARSERS.split():
        check_names("auto", name)
        assert ModelOptions(reasoning_format=name).to_config("demo").reasoning_format == name


def test_a_file_has_a_format(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(to_dict(PRESETS["jamba"])))
    form = preset_or_file(str(file))
    assert not isinstance(form, str)
    assert (form.source, form.call) == ("file", PRESETS["jamba"].call)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "tool_format: Expected `object`"),
        ('{"call": ["{name}", "{arguments}"], "arguments": {"type": "json"}}', "no markup begins a call"),
        ('{"call": ["<c>", "{arguments}", "{name}"], "arguments": {"type": "json"}}', "must contain {name}"),
        ('{"call": ["<c>", "{name}", "{arguments}"], "arguments": {"type": "quoted", "quote": ""}}', "quote is empty"),
        (
            '{"call": ["<c>", "{name}", "{arguments}"], "arguments": {"type": "tagged", "opening": "<a>", "middles": '
            '{"any": ">"}, "closing": "</a>", "literals": "ruby"}}',
            "literals is 'ruby'",
        ),
        (" " * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_file_without_a_format_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=reason) as refused:
        check_names(str(file), "auto")
    assert refused.value.param == "tool_format"


@pytest.mark.parametrize(("tools", "reasoning"), [("hermess", "auto"), ("/none.json", "auto"), ("auto", "thinking")])
def test_every_way_in_refuses_unknown_names(tools: str, reasoning: str) -> None:
    with pytest.raises(InvalidRequest, match="format"):
        ModelOptions(tool_format=tools, reasoning_format=reasoning).to_config("demo")
    with pytest.raises(InvalidRequest, match="format"):
        LLM("demo", tool_format=tools, reasoning_format=reasoning)


# -- a model with a named format ---------------------------------------------------------------------------------


def fresh(**settings: Any) -> Tokenizer:
    text = Tokenizer.load(tokenizer_folder())
    text.chat_settings = ChatSettings(**settings)
    return text


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 300, "temperature": 0}


def answer_of(said: str, text: Tokenizer) -> Any:
    model = scripted_model(text=text, next_token=saying(said, text), max_model_len=2048)
    with local_client(model) as client:
        shown = client.get("/v1/models/" + model.name).json()["chat_format"]
        assert shown == json.loads(json.dumps(chat_format(text)))
        answer = client.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["qwen3_xml", "glm47", "minimax_m2", "lfm2", "gemma4", "jamba", "hermes"])
def test_answers_are_read_in_the_named_format(name: str) -> None:
    said = SAID[ALIASES.get(name, name)]
    message = answer_of(said, fresh(tool_format=name))
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [CALL[1]]


def test_a_named_format_is_shown() -> None:
    text = fresh(tool_format="qwen3_xml")
    assert described(text)["name"] == "qwen3_coder"
    assert summary(text).startswith("tool calls in the format qwen3_coder (<tool_call> <function={name}>")
    assert summary(fresh()).startswith("tool calls in the format hermes")


def test_formats_that_the_vocabulary_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="has no channels"):
        format_of(fresh(tool_format="harmony"))
    with pytest.raises(InvalidRequest, match="has no tokens <think>"):
        tags_of(fresh(reasoning_format="qwen3"))
    assert tags_of(fresh(reasoning_format="none")) is None


def test_a_format_that_is_not_found_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    text = fresh()
    with caplog.at_level("INFO"):
        format_of(text), format_of(text)
    assert sum("--tool-format" in record.getMessage() for record in caplog.records) == 1


# -- calls without markup ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [_JSON, f"```json\n{_JSON}\n```", f'{{{{"name": "f", "arguments": {_ARGS}}}}}'])
def test_an_answer_may_begin_with_a_call_without_markup(shown: str) -> None:
    for name, is_on in product([*MARKED, "mistral"], (True, False)):
        kind = Mistral((), True, is_on) if name == "mistral" else InferredFormat(PRESETS[name], {}, is_on)
        for pieces in ([shown], list(shown)):
            found = read(kind.reader(rules=RULES), pieces)
            assert found == (("", [CALL]) if is_on else (shown, [])), name


def test_calls_with_markup_may_follow_one_without() -> None:
    for name in MARKED:
        text = f"{_JSON}\n{SAID[name]}"
        for pieces in ([text], list(text)):
            assert read(InferredFormat(PRESETS[name], {}).reader(rules=RULES), pieces) == ("", [CALL, CALL]), name


@pytest.mark.parametrize(
    "text",
    ["Well: " + _JSON, _JSON.replace('"f"', '"h"'), '{"name": "f", "arguments": 5}', '{"name": "f", "argum', "{"],
)
def test_other_json_is_content(text: str) -> None:
    kind = InferredFormat(PRESETS["qwen3_coder"], {})
    for pieces in ([text], list(text)):
        assert read(kind.reader(rules=RULES), pieces) == (text, [])


def test_a_switch_turns_calls_without_markup_off() -> None:
    assert answer_of(_JSON, fresh()).get("tool_calls")
    assert answer_of(_JSON, fresh(bare_calls=False))["content"] == _JSON
    assert tokenizer().chat_settings == ChatSettings()
    assert ModelOptions(bare_calls=False).to_config("demo").bare_calls is False
