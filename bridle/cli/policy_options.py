"""The flag that sets an operator's policies for all outputs of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from bridle.serving.policies import PolicyRegistry, PolicySet


@Parameter(name="*", group=Group("Access", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Policies for all outputs."""

    policies: Path | None = None
    "TOML file of policies that every output must follow."

    def book(self) -> PolicyRegistry | None:
        """Return the registry of policies for a server; None without policies."""
        if self.policies is None:
            return None
        from bridle.serving.policies import PolicyRegistry

        return PolicyRegistry(self.policies)

    def demands(self) -> PolicySet | None:
        """Return the policies for a model that this process loads; None without policies."""
        book = self.book()
        return None if book is None else book.current
