"""Tests of prompt caches that users share with their group: the users who may use or delete them, and private data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from bridle.config import EngineConfig
from bridle.http import HttpSettings, create_app
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import saying, scripted_model
from tests.http.tool_calls import BLOCK

#: Tokens of a shared prompt: whole blocks.
RULES = [7, 8, 9, 10] * BLOCK
#: Users and their groups.
GROUPS = {"ann": "red", "bob": "red", "eve": "blue", "sue": ""}


class Users:
    """A client for each user of one server."""

    def __init__(self, app: TestClient, keys: dict[str, str]) -> None:
        self._app, self._keys = app, keys

    def call(self, user: str, method: str, path: str = "", body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._keys[user]}"}
        return self._app.request(method, f"/v1/caches{path}", json=body, headers=headers)

    def create(self, user: str, **fields: Any) -> dict[str, Any]:
        answer = self.call(user, "POST", body={"prompt": RULES, **fields})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def cached(self, user: str, prompt: list[int]) -> int:
        headers = {"authorization": f"Bearer {self._keys[user]}"}
        body = {"prompt": prompt, "max_tokens": 1}
        usage = self._app.post("/v1/completions", json=body, headers=headers).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    def listed(self, user: str) -> list[tuple[bool, bool]]:
        return [(each["shared"], each["owned"]) for each in self.call(user, "GET").json()["data"]]


@contextmanager
def users_of(folder: Path) -> Iterator[Users]:
    model = scripted_model(
        next_token=saying("Fine."), max_model_len=2048, config=EngineConfig(park_memory=1 << 20), num_blocks=256
    )
    store = KeyStore(folder / "keys.db")
    keys = {user: store.add(user, group=group) for user, group in GROUPS.items()}
    with TestClient(create_app(ModelRegistry([model]), keys=store)) as client:
        yield Users(client, keys)
    store.close()
    model.close()


def test_a_group_reads_what_one_of_it_shares_and_nothing_else(tmp_path: Path) -> None:
    with users_of(tmp_path) as users:
        made = users.create("ann", share=True)
        assert (made["shared"], made["owned"]) == (True, True)
        own = [*RULES, *range(50, 50 + 3 * BLOCK)]
        assert users.cached("ann", own) == len(RULES)
        assert users.cached("ann", own) == len(own) - BLOCK  # the last token is computed
        assert users.cached("bob", own) == len(RULES)
        assert users.cached("eve", own) == users.cached("sue", own) == 0
        assert users.cached("bob", [*RULES[:-1], 1, 2]) == 0  # it does not begin with the whole prompt
        assert [users.listed(user) for user in GROUPS] == [[(True, True)], [(True, False)], [], []]


def test_the_tokens_that_fill_no_block_may_differ(tmp_path: Path) -> None:
    """A prompt that ends within a word has other tokens when the word continues."""
    with users_of(tmp_path) as users:
        users.create("ann", prompt=[*RULES, 1, 2, 3], share=True)
        assert [users.cached(user, [*RULES, 1, 2, 4, 5]) for user in ("ann", "bob")] == [len(RULES)] * 2


def test_a_cache_that_is_not_shared_is_found_by_its_user_alone(tmp_path: Path) -> None:
    with users_of(tmp_path) as users:
        assert not users.create("ann")["shared"]
        assert [users.cached(user, [*RULES, 1]) for user in GROUPS] == [len(RULES), 0, 0, 0]
        assert [users.listed(user) for user in GROUPS] == [[(False, True)], [], [], []]


def test_the_owner_alone_ends_a_shared_cache(tmp_path: Path) -> None:
    with users_of(tmp_path) as users:
        path = f"/{users.create('ann', share=True)['id']}"
        assert users.call("bob", "GET", path).json()["owned"] is False
        for method, route in (("DELETE", path), ("POST", f"{path}/prefetch")):
            answer = users.call("bob", method, route)
            assert (answer.status_code, "only its owner" in answer.text) == (403, True)
            assert users.call("eve", method, route).status_code == 404
        assert users.call("ann", "POST", f"{path}/prefetch").json()["usage"]["cached_tokens"] == len(RULES) - BLOCK
        assert users.call("ann", "DELETE", path).json()["deleted"]
        assert users.listed("bob") == []
        assert users.cached("bob", [*RULES, 1]) == 0


def test_the_longest_shared_prompt_counts(tmp_path: Path) -> None:
    longer = [*RULES, *[3] * BLOCK]
    with users_of(tmp_path) as users:
        users.create("ann", share=True)
        users.create("bob", share=True, prompt=longer)
        assert users.cached("ann", [*longer, 1]) == len(longer)
        assert users.cached("ann", [*RULES, 1]) == len(RULES)


def test_a_user_without_a_group_cannot_share(tmp_path: Path) -> None:
    with users_of(tmp_path) as users:
        answer = users.call("sue", "POST", body={"prompt": RULES, "share": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "share")
        assert "`bridle keys add USER --group GROUP`" in answer.text


def test_a_trusted_proxy_names_the_group() -> None:
    model = scripted_model(max_model_len=2048, config=EngineConfig(park_memory=1 << 20))
    settings = HttpSettings(trusted_proxies=("127.0.0.1",))
    app = create_app(ModelRegistry([model]), settings)
    with TestClient(app, client=("127.0.0.1", 1)) as client:
        for user, group, found in (("ann", "red", True), ("bob", "red", True), ("eve", "blue", False)):
            headers = {"x-user-id": user, "x-user-group": group}
            if user == "ann":
                client.post("/v1/caches", json={"prompt": RULES, "share": True}, headers=headers).raise_for_status()
            assert bool(client.get("/v1/caches", headers=headers).json()["data"]) == found
        refused = client.get("/v1/caches", headers={"x-user-id": "ann", "x-user-group": "g" * 101})
        assert (refused.status_code, "x-user-group has 101 characters" in refused.text) == (401, True)
    model.close()
