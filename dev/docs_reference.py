"""An extension of mkdocstrings that shows readable defaults in the reference of the Python API. For example, a
dataclass field with the default `_param(16, ...)`, which contains further metadata, shows `16`."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, Extension


class PlainDefaults(Extension):
    """Replaces a default that calls one of bridle's private functions by the call's first argument."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Replace the default of a field; this method is called before signatures are made from the fields."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function).startswith("_") and value.arguments:
            attr.value = value.arguments[0]
