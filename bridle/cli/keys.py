"""`bridle keys`: the users of a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from bridle.cli.short_help import epilogue
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.serving.tenancy.keys import KeyStore
    from bridle.serving.tenancy.rate_limit import UserLimits

File = Annotated[Path | None, Parameter(name="--keys")]

app = App(
    name="keys",
    help="Make, list, limit and remove API keys. A running server applies changes at once.",
    help_epilogue=epilogue("keys"),
)


@app.command
def add(
    user: str, /, *, admin: Annotated[bool, Parameter(negative="")] = False, group: str = "", keys: File = None
) -> int:
    """Make a key and print it. Only the key's hash is stored, so the key cannot be shown again.

    Parameters
    ----------
    user
        User that owns the key. A user may have several keys.
    admin
        Let the user manage everything, such as every tag of controllers.
    group
        Group of users with whom this key may share prompt caches. Default: none.
    keys
        File of keys, for `bridle serve --keys FILE`. Default: keys.db in the user's data folder.
    """
    with _store(keys, makes=True) as (store, path):
        key = store.add(user, is_admin=admin, group=group)
    print(f"A key for {user} in {path}; keep it, it is not shown again:", file=sys.stderr)
    print(key)
    return 0


@app.command(name="list")
def list_keys(*, keys: File = None) -> int:
    """List keys: first characters, user, role, creation time, group, limits.

    Parameters
    ----------
    keys
        File of keys. Default: keys.db in the user's data folder.
    """
    with _store(keys) as (store, path):
        found = store.list()
    for info in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created))
        role = "admin" if info.is_admin else "user"
        group = f"group {info.group}" if info.group else ""
        more = ", ".join(filter(None, (group, _shown(info.limits))))
        print(f"{info.prefix}...  {info.user:<40} {role:<5}  {when}  {more}".rstrip())
    if not found:
        print(f"no keys in {path}: `bridle keys add USER` makes one", file=sys.stderr)
    return 0


@app.command
def limit(
    user: str,
    /,
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    weight: float = 1.0,
    most_urgent: Annotated[int, Parameter(allow_leading_hyphen=True)] = 0,
    keys: File = None,
) -> int:
    """Set the limits of a user, for all of the user's keys. Limits that are left out are removed.

    Parameters
    ----------
    user
        User to limit.
    requests_per_minute
        Maximum number of requests per minute. Default: no limit.
    tokens_per_minute
        Maximum number of prompt and output tokens per minute. Default: no limit.
    weight
        Share of a busy engine, relative to other users.
    most_urgent
        Lowest priority number that the user's requests may have; lower numbers are served first. With 0, users can
        only lower their priority. A number above 0 is also the default of the user's requests. Admins may use any
        number.
    keys
        File of keys. Default: keys.db in the user's data folder.
    """
    from bridle.serving.tenancy.rate_limit import UserLimits

    limits = UserLimits(requests_per_minute, tokens_per_minute, weight, most_urgent)
    with _store(keys) as (store, _):
        store.set_limits(user, limits)
    print(f"{user}: {_shown(limits) or 'no limits'}")
    return 0


@app.command
def remove(which: str, /, *, keys: File = None) -> int:
    """Remove a key, or all keys of a user.

    Parameters
    ----------
    which
        First characters of a key, as `bridle keys list` shows them, or a user.
    keys
        File of keys. Default: keys.db in the user's data folder.
    """
    with _store(keys) as (store, path):
        num_removed = store.remove(which.removesuffix("..."))
    if not num_removed:
        raise InvalidRequest(f"{path} has no key or user {which!r}; see `bridle keys list`", "which")
    print(f"removed {num_removed}")
    return 0


def _shown(limits: UserLimits) -> str:
    """Return the limits of a user that differ from the defaults, as text."""
    parts = []
    if limits.requests_per_minute is not None:
        parts.append(f"{limits.requests_per_minute} requests a minute")
    if limits.tokens_per_minute is not None:
        parts.append(f"{limits.tokens_per_minute} tokens a minute")
    if limits.weight != 1:
        parts.append(f"weight {limits.weight:g}")
    if limits.most_urgent:
        parts.append(f"priority from {limits.most_urgent}")
    return ", ".join(parts)


@contextmanager
def _store(path: Path | None, *, makes: bool = False) -> Iterator[tuple[KeyStore, Path]]:
    """Return the key store in a file. Only a command that adds a key (`makes`) may name a file that does not exist."""
    from bridle.serving.controller_runtime import data_folder
    from bridle.serving.tenancy.keys import KeyStore

    path = path or data_folder() / "keys.db"
    if not makes and not path.is_file():
        raise InvalidRequest(
            f"there is no file of API keys {path}; `bridle keys add USER --keys {path}` creates it", "keys"
        )
    with closing(KeyStore(path)) as store:
        yield store, path
