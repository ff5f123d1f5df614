"""Tests of chat templates: they agree with transformers, and invalid or hostile templates are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bridle.errors import InvalidRequest, TemplateFailure, UnsupportedFeature, UnsupportedModel
from bridle.tokenizer import chat_template
from bridle.tokenizer.chat_template import MAX_TEMPLATE_CHARS, ROLES, ChatTemplate, prepare
from bridle.tokenizer.template_engine import ChatTemplateProgram, TemplateError, TemplateLimits
from tests.tokenizer.templates import a_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{% generation %}{{- '<|im_start|>assistant\n' }}{% endgeneration %}{%- endif %}
{{ tools | tojson(indent=2) if tools }} {{ custom | default('none') }} {{ bos_token ~ eos_token }}
"""


def render(own: str | Mapping[str, str] | None, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(own, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(
        prepare(HELLO if messages is None else messages),
        options.pop("tools", None),
        options.pop("template", None),
        options,
    )


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "x": "<é&>"}}]])
@pytest.mark.parametrize("apart", [False, True])
def test_it_renders_as_transformers_does(apart: bool, tools: list[dict[str, Any]] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*HELLO, {"role": "assistant", "content": " hi <b> "}] * 2
    expected, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=CHATML,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        custom="yes",
    )
    own, template = (None, CHATML) if apart else (CHATML, None)
    assert render(own, messages, tools=tools, template=template, custom="yes") == expected[0]


@pytest.mark.parametrize("apart", [False, True])
def test_developers_write_the_system_message_unless_the_template_knows_them(apart: bool) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    silent = "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{% endif %}{% endfor %}"
    own, template = (None, silent) if apart else (silent, None)
    assert render(own, messages, template=template) == "[system][user]"
    knowing = silent.replace("'system'", "'developer'")
    assert render(knowing, messages) == "[developer][user]"


def test_named_templates_are_chosen_by_use() -> None:
    named = {"default": "plain", "tool_use": "with tools"}
    assert render(named) == "plain"
    assert render(named, tools=[{"name": "f"}]) == "with tools"
    assert render({"default": "plain"}, tools=[{"name": "f"}]) == "plain"


@pytest.mark.parametrize("own", [None, "", {}])
def test_without_a_template_chat_is_refused(own: Any) -> None:
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        render(own)
    assert render(own, template="{{ messages[0].content }}") == "hello"


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="refused the messages: no"):
        render(None, template="{{ raise_exception('no') }}")


def test_parameters_without_description_have_an_empty_one_where_the_template_needs_it() -> None:
    each = "{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}WORD{% endfor %}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    for word, text in [("{{ k + ': ' + v.description }}", "a: "), ("{{ k }}{{ v.description is defined }}", "aFalse")]:
        assert ChatTemplate(each.replace("WORD", word), {}).render([], tools, None, {}) == text
    with pytest.raises(TemplateFailure, match="failed on these messages"):
        ChatTemplate(each.replace("WORD", "{{ k + v.title }}"), {}).render([], tools, None, {})


def test_whose_fault_a_broken_template_is() -> None:
    with pytest.raises(UnsupportedModel, match=r"chat template is not valid: line 2"):
        render("\n{% if %}")
    with pytest.raises(InvalidRequest, match=r"is not valid: line 1"):
        render(None, template="{% for %}")
    with pytest.raises(InvalidRequest, match=r"failed on these messages: UndefinedError"):
        render("{{ messages[0].nothing.more }}")


def test_variables_cannot_replace_what_the_call_sets() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ tools }} {{ add_generation_prompt }} {{ other }}", {})
    given = {"messages": [], "tools": 1, "add_generation_prompt": 2, "other": 3}
    assert template.render(prepare(HELLO), None, None, given) == "hello None True 3"


SIXTY_TIMES = "{{% set ns = namespace(x='aaaaaaaa') %}}{{% for i in range(60) %}}{}{{% endfor %}}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without calls": "{% set x = 'a' * 9999 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "multiplied text": "{{ 'a' * 10**9 }}",
    "multiplied list": "{{ ([0] * 10**9) | length }}",
    "doubling": SIXTY_TIMES.format("{% set ns.x = ns.x + ns.x %}"),
    "doubling by joining": SIXTY_TIMES.format("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by capture": SIXTY_TIMES.format("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "power": "{{ 9**9**9**9**9 }}",
    "long number": SIXTY_TIMES.replace("'aaaaaaaa'", "9").format("{% set ns.x = ns.x * ns.x %}"),
    "padding": "{{ 'x' | center(10**10) }}",
    "formatting": "{{ '%9999999999d' % 1 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "format attack": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "changes": "{{ messages.append(1) }}",
    "environment": "{{ self.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "nested lists": SIXTY_TIMES.format("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
}
STOPPED_HERE = sorted(set(HOSTILE) - {"padding", "formatting", "nested lists", "replace"})


@pytest.mark.few(8)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_templates_of_clients_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(None, template=HOSTILE[name])
    assert caught.value.param in ("chat_template", "messages")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", STOPPED_HERE)
def test_most_are_stopped_in_process_too(name: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplateProgram(HOSTILE[name], TemplateLimits(100_000, 1 << 20)).render({"messages": [{"role": "user"}]})


@pytest.mark.parametrize(
    "source", ["{{ ''|attr('__class__') }}", "{{ raise_exception.__globals__ }}", "{{ x.__class__ }}"]
)
def test_internals_look_undefined(source: str) -> None:
    assert render(None, template=source, x="text") == render(source, x="text") == ""


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.0)
    with pytest.raises(InvalidRequest, match="takes more than 0 seconds"):
        render(None, template="x")


def test_only_so_many_client_templates_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridle.errors import Overloaded

    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.0)
    for _ in range(2):
        chat_template.processes.acquire()
    try:
        with pytest.raises(Overloaded):
            render(None, template="x")
    finally:
        chat_template.processes.release(2)


def test_long_client_templates_are_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TEMPLATE_CHARS}"):
        render(None, template="x" * (MAX_TEMPLATE_CHARS + 1))


def test_variables_of_a_client_template_must_be_json() -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        render(None, template="x", thing=object())


def test_tracing_is_left_as_it_was() -> None:
    import sys

    def tracer(frame: Any, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        render("{{ messages[0].content }}")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


# -- messages ------------------------------------------------------------------------------------------------


def test_messages_are_brought_into_one_form() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"function": {"name": "f", "arguments": "{oops"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    prepared = prepare(messages)
    assert prepared[2]["content"] == "no"
    assert prepared[0]["content"] == "a\nb"
    assert prepared[1]["content"] == ""
    assert prepared[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert prepared[1]["tool_calls"][1] == odd
    assert call["function"]["arguments"] == '{"a": 1}'  # the caller's is untouched


def test_a_role_is_usual_or_a_quoted_word_of_the_template() -> None:
    template = "{% if m.role == 'observation' or m.role == \"critic\" %}{{ m.user_role }}{% endif %}"
    for role in (*ROLES, "observation", "critic"):
        assert prepare([{"role": role, "content": "x"}], template=template)[0]["role"] == role
    for role in ("usr", "role", "User", "observation'"):
        with pytest.raises(
            InvalidRequest, match=r"messages\[1\]\.role is .*; must be one of system, .*Correct"
        ) as caught:
            prepare([*HELLO[:1], {"role": role, "content": "x"}], template=template)
        assert caught.value.param == "messages[1].role"
        with pytest.raises(InvalidRequest, match="must be one of"):
            a_tokenizer(template).render_chat([{"role": role, "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], InvalidRequest),
        ("hello", InvalidRequest),
        ({"role": "user"}, InvalidRequest),
        (["hello"], InvalidRequest),
        ([{"content": "x"}], InvalidRequest),
        ([{"role": 3, "content": "x"}], InvalidRequest),
        ([{"role": "user", "content": 5}], InvalidRequest),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidRequest),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], UnsupportedFeature),
        ([{"role": "assistant", "tool_calls": ["x"]}], InvalidRequest),
        ([{"role": "user", "content": "x"}] * 5000, InvalidRequest),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        prepare(messages)
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages")
