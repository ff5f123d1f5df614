"""Chat templates that accept different roles."""

from __future__ import annotations

_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments if c.function.name.startswith('z') }}{% endfor %}"
)
_EACH_PART = "{% for p in m.content %}{{ p.text if p.type == 'text' else 'IMAGE' }}{% endfor %}"
_TURN = "<{{ m.role }}>THOUGHTS" + _CONTENT
_LOOP = "{% for m in messages %}BEFORETURN{% endfor %}"


def _template(before: str = "", turn: str = _TURN) -> str:
    return _LOOP.replace("BEFORE", before).replace("TURN", turn).replace("THOUGHTS", "")


def any_role(thoughts: str = "") -> str:
    """Return a template for messages of any role, which writes `thoughts` first. Only users may send lists of parts."""
    parts = "{% if m.role == 'user' %}" + _EACH_PART + "{% else %}{{ m.content }}{% endif %}"
    return _LOOP.replace("BEFORE", "").replace("TURN", _TURN.replace("PARTS", parts)).replace("THOUGHTS", thoughts)


#: The same, with parts in all roles.
PARTS = _template(turn=_TURN.replace("PARTS", _EACH_PART))
#: Refuses system messages but the first.
FIRST_SYSTEM = _template("{{ raise_exception('only first') if m.role == 'system' and not loop.first }}")
#: Drops them silently.
ONLY_FIRST_SYSTEM = _template(turn="{% if m.role != 'system' or loop.first %}" + _TURN + "{% endif %}")
#: Refuses all of them.
NO_SYSTEM = _template("{{ raise_exception('System role not supported') if m.role == 'system' }}")
#: Wants user and assistant in turn, but for calls and results.
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{{ raise_exception('roles must alternate') if (m.role == 'user') != (ns.n % 2 == 0) }}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}" + _template(turn="{% if m.tool_calls %}" + _CONTENT + "{% else %}" + _TURN + "{% endif %}")
)
