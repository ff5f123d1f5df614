"""Access to tools, for all users or for certain names or roles."""

from __future__ import annotations

from dataclasses import dataclass

#: Possible roles of a key's owner.
ROLES = ("admin", "user")


@dataclass(frozen=True, slots=True)
class ToolPermission:
    """The users and roles that may use a tool. If both are empty, every user may use the tool."""

    users: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()

    def permits(self, user: str, is_admin: bool) -> bool:
        """Return whether this user may use the tool."""
        if not (self.users or self.roles):
            return True
        return user in self.users or ("admin" if is_admin else "user") in self.roles


EVERYBODY = ToolPermission()
