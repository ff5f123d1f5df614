"""What a text must look like, token by token.

`Constraint` is the base: subclasses of a script's own decide in Python. The others live on the host's side, where
masks are computed; here is but a number. `JsonConstraint` and `LarkConstraint` go beyond AICI.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from wit_world.imports import host

from pyaici.tokens import TokenSet, eos_token, token_repr, tokenize

_MAY_END, _IS_OVER, _IS_FAILED = 1, 2, 4


class Constraint:
    """Allows everything."""

    def eos_allowed(self) -> bool:
        """The text may end here."""
        return True

    def eos_forced(self) -> bool:
        """Nothing may follow."""
        return False

    def token_allowed(self, token: int) -> bool:
        """This token may come next."""
        return True

    def append_token(self, token: int) -> None:
        """This token came."""

    def allow_tokens(self, token_set: TokenSet) -> None:
        """Make `token_set` the tokens that may come next."""
        token_set.set_all(True)


class HostConstraint(Constraint):
    """A constraint of one of the host's kinds. Raises `ValueError` if it makes no sense."""

    def __init__(self, kind: str, spec: str) -> None:
        self._handle = 0
        self._num_tokens = 0
        try:
            self._handle = host.constraint_new(kind, spec)
        except Exception as error:
            raise ValueError(str(getattr(error, "value", error))) from None
        if host.constraint_status(self._handle) & _IS_FAILED:
            raise ValueError(host.constraint_error(self._handle))

    def __del__(self) -> None:
        if self._handle:
            with contextlib.suppress(Exception):
                host.constraint_free(self._handle)

    def eos_allowed(self) -> bool:
        return bool(host.constraint_status(self._handle) & _MAY_END)

    def eos_forced(self) -> bool:
        return bool(host.constraint_status(self._handle) & _IS_OVER)

    def token_allowed(self, token: int) -> bool:
        allowed = TokenSet()
        self.allow_tokens(allowed)
        return allowed[token]

    def append_token(self, token: int) -> None:
        if token == eos_token():
            return
        if host.constraint_commit(self._handle, [token]) != 1:
            raise ValueError(f"token {token_repr(token)} does not continue the constrained text")

    def allow_tokens(self, token_set: TokenSet) -> None:
        token_set.keep_mask(host.constraint_allow(self._handle))

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, if there is no choice. Beyond AICI."""
        return list(host.constraint_ff(self._handle))


class RegexConstraint(HostConstraint):
    """The whole text matches `pattern`, in Rust's syntax; `^` and `$` around it are implied."""

    def __init__(self, pattern: str) -> None:
        pattern = pattern.removeprefix("^")
        if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern):
            pattern = pattern[:-1]
        super().__init__("regex", pattern)


class CfgConstraint(HostConstraint):
    """The text is derived from a grammar in yacc's notation."""

    def __init__(self, yacc_grammar: str) -> None:
        super().__init__("yacc", yacc_grammar)


class SubStrConstraint(HostConstraint):
    """The text is a run of whole words of `template`, followed by `stop_at`."""

    def __init__(self, template: str, stop_at: str) -> None:
        super().__init__("constraint", json.dumps({"substring": template, "end": stop_at}))


class JsonConstraint(HostConstraint):
    """The text is JSON that fits a schema (a mapping or its JSON text)."""

    def __init__(self, schema: Mapping[str, Any] | str | bool) -> None:
        super().__init__("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


class LarkConstraint(HostConstraint):
    """The text is derived from a grammar in Lark's notation."""

    def __init__(self, grammar: str) -> None:
        super().__init__("lark", grammar)


class ChooseConstraint(Constraint):
    """The text is one of `options`, each spelled by the tokens that it has on its own. Of none nothing can come:
    whoever draws under it gets the end, as of every constraint that allows nothing."""

    def __init__(self, options: Sequence[str]) -> None:
        if isinstance(options, str):
            raise ValueError(f"options is {options!r}; must be a list of texts")
        self.ptr = 0
        self.options = [tokenize(option) for option in options]

    def eos_allowed(self) -> bool:
        return any(len(option) == self.ptr for option in self.options)

    def eos_forced(self) -> bool:
        return bool(self.options) and all(len(option) == self.ptr for option in self.options)

    def token_allowed(self, token: int) -> bool:
        return token in self._next() or (token == eos_token() and self.eos_allowed())

    def append_token(self, token: int) -> None:
        self.options = [option for option in self.options if option[self.ptr : self.ptr + 1] == [token]]
        self.ptr += 1

    def allow_tokens(self, token_set: TokenSet) -> None:
        token_set.set_all(False)
        for token in self._next():
            token_set[token] = True
        if self.eos_allowed():
            token_set[eos_token()] = True

    def forced_tokens(self) -> list[int]:
        """What all options that are left have in common. Beyond AICI."""
        ptr = self.ptr
        while not any(len(option) == ptr for option in self.options) and len({o[ptr] for o in self.options}) == 1:
            ptr += 1
        return self.options[0][self.ptr : ptr] if self.options else []

    def _next(self) -> set[int]:
        return {option[self.ptr] for option in self.options if len(option) > self.ptr}


class DynamicLexer:
    """Identifiers in a text must be among the words added so far; all else is free. Identifiers consist of letters,
    digits, `_` and `additional_id_chars`; what begins with a digit is none."""

    def __init__(self, additional_id_chars: str = "") -> None:
        self._chars = "A-Za-z0-9_" + "".join(map(_escaped, additional_id_chars))
        self._words: list[str] = []

    def add(self, word: str) -> None:
        """Allow an identifier."""
        if not re.fullmatch(f"[{self._chars}]+", word):
            raise ValueError(f"{word!r} is no identifier")
        if word not in self._words:
            self._words.append(word)

    def constraint(self) -> Constraint:
        """A constraint by the words of now."""
        words = "|".join(["".join(map(_escaped, word)) for word in self._words] + [f"[0-9][{self._chars}]*"])
        free = f"[^{self._chars}]"
        return RegexConstraint(f"{free}*(?:(?:{words}){free}+)*(?:{words})?")


def _escaped(char: str) -> str:
    return char if char.isalnum() or char == "_" else f"\\{char}"
