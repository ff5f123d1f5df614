"""Reads structural tags of vLLM and SGLang: free text in which a trigger begins a text of a fixed structure.

{"structures": [{"begin": "<call=add>", "schema": {...}, "end": "</call>"}], "triggers": ["<call="]}

The newer form of a structural tag has the field `format` instead, which `structural_format` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output import limits
from bridle.structured_output.checks import PARAM, check_count
from bridle.structured_output.spec import Constraint, Lark
from bridle.structured_output.structural_format import format_grammar, json_part, quoted


def structural_tag(value: Any) -> Constraint:
    """Return the constraint of a structural tag, which is an object or its JSON text. Raises `InvalidRequest`, which
    names the invalid part."""
    form = _object(value)
    structures, triggers = form.get("structures"), form.get("triggers")
    if form.get("format") is not None:
        return Lark(format_grammar(form["format"]))
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest("structural_tag needs 'format', or the lists 'structures' and 'triggers'", PARAM)
    check_count(len(structures), limits.MAX_PARTS, "structural_tag", "structures")
    check_count(len(triggers), limits.MAX_PARTS, "structural_tag", "triggers")
    if not all(isinstance(each, str) and each for each in triggers):
        raise InvalidRequest("structural_tag.triggers must hold texts that are not empty", PARAM)
    bodies: dict[str, list[str]] = {}
    for number, structure in enumerate(structures):
        trigger, body = _body(structure, triggers, f"structural_tag.structures[{number}]")
        bodies.setdefault(trigger, []).append(body)
    return Lark(_grammar(bodies))


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"structural_tag is not JSON: {str(error)[:200]}", PARAM) from None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"structural_tag is {short_repr(value)}; must be an object", PARAM)
    return value


def _body(structure: Any, triggers: list[str], where: str) -> tuple[str, str]:
    """Return the trigger of a structure, and the text after the trigger as the right side of a grammar rule."""
    if not isinstance(structure, Mapping):
        raise InvalidRequest(f"{where} is {short_repr(structure)}; must be an object", PARAM)
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str):
        raise InvalidRequest(f"{where} needs 'begin' and 'end', which are texts", PARAM)
    trigger = max(filter(begin.startswith, triggers), key=len, default=None)
    if trigger is None:
        raise InvalidRequest(f"{where} begins with {short_repr(begin)}, which no trigger begins", PARAM)
    words = (quoted(begin[len(trigger) :]), json_part(schema), quoted(end))
    return trigger, " ".join(filter(None, words))


def _grammar(bodies: Mapping[str, list[str]]) -> str:
    rules: list[str] = []
    for number, (trigger, structures) in enumerate(bodies.items()):
        parts = [f"tag_{number}_{i}" for i in range(len(structures))]
        rules.append(f"head_{number}[lazy]: TEXT {quoted(trigger)}")
        rules.append(f"tag_{number}: head_{number} ({' | '.join(parts)})")
        rules += [f"{part}: {body}" for part, body in zip(parts, structures, strict=True)]
    tags = " | ".join(f"tag_{number}" for number in range(len(bodies)))
    return "\n".join([f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules, ""])
