"""An extension of mkdocstrings for the reference of the Python API: it shows readable defaults. A dataclass field whose
default has further metadata, `_param(16, ...)`, shows `16`."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, Extension


class PlainDefaults(Extension):
    """Shows the first argument instead of a call of one of bridle's own functions."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Replace the default of a field; called before signatures are made of the fields."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function).startswith("_") and value.arguments:
            attr.value = value.arguments[0]
