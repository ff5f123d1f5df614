"""Names of modules: the syntax of tags, the rule for who may set them, and the syntax of `gh:` references."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridle.aici.protocol import Auth
from bridle.errors import InvalidRequest

MAX_TAG = 50
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*\Z")
_HEX = re.compile(r"[0-9a-fA-F]+\Z")
_MODULE_ID = re.compile(r"[0-9a-f]{64}\Z")
_GH = re.compile(r"gh:[A-Za-z0-9./_-]+\Z")
_VERSION = re.compile(r"v\d+\.\d+")


def is_module_id(text: str) -> bool:
    """Return whether `text` has 64 lower-case hex digits, so that it may be part of a file name."""
    return _MODULE_ID.match(text) is not None


def is_tag(text: str) -> bool:
    """Return whether `text` is a valid tag."""
    if not 0 < len(text) <= MAX_TAG or _TAG.match(text) is None:
        return False
    return not (len(text) > 20 and _HEX.match(text))


def check_tag(tag: str, auth: Auth) -> None:
    """Raise `InvalidRequest` unless `auth` may set `tag`."""
    if not is_tag(tag):
        raise InvalidRequest(
            f"invalid tag {tag[:80]!r}: use at most {MAX_TAG} letters, digits, '_', '-' or '.', with a letter first. "
            "A tag of hexadecimal digits alone has at most 20 digits"
        )
    if not auth.is_admin and not tag.startswith(f"{auth.user}."):
        raise InvalidRequest(f"tag {tag!r}: user {auth.user!r} may only set tags that start with '{auth.user}.'")


@dataclass(frozen=True, slots=True)
class GhReference:
    """A reference to a release asset: `gh:owner/repo[/selector][/version]`."""

    owner: str
    repo: str
    selector: str = ""
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> GhReference:
        """Parse a reference. Raises `InvalidRequest` with the allowed syntax."""
        parts = text[3:].split("/")
        if _GH.match(text) is None or not 2 <= len(parts) <= 4 or not all(parts) or ".." in text:
            raise InvalidRequest(f"invalid reference {text[:120]!r}; must be gh:owner/repo[/selector][/version]")
        version = ""
        if len(parts) > 2 and (parts[-1] == "latest" or _VERSION.match(parts[-1])):
            version = parts.pop()
        if len(parts) > 3:
            raise InvalidRequest(f"invalid reference {text[:120]!r}: {parts[-1]!r} is not a version")
        return cls(parts[0], parts[1], parts[2] if len(parts) == 3 else "", version)

    @property
    def url(self) -> str:
        """Return the URL of the release's metadata. As in the original runtime, an explicit `latest` means the tag
        `latest`."""
        base = f"https://api.github.com/repos/{self.owner}/{self.repo}/releases"
        return f"{base}/tags/{self.version}" if self.version else f"{base}/latest"
