"""The reference of the Python API as mkdocstrings makes it: defaults that readers can use. A field of a dataclass whose
default is given with other metadata, `_param(16, ...)`, shows `16`."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, Extension


class PlainDefaults(Extension):
    """Shows the first argument in place of a call of one of our own functions."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Called for each field, before signatures are made of them."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function).startswith("_") and value.arguments:
            attr.value = value.arguments[0]
