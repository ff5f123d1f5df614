"""Checks the named models and the server's address before torch is imported. Importing torch takes seconds, and a
misspelled name should be reported sooner."""

from __future__ import annotations


def check_models(*names: str | None, revision: str | None = None) -> None:
    """Check that models are on this machine or on the hub. Entries that have no name (None) are skipped. `revision`
    belongs to the first model. Raises `InvalidRequest` and `UnsupportedModel`."""
    from bridle.model.hub_lookup import check_available

    for number, name in enumerate(names):
        if name is not None:
            check_available(name, None if number else revision)


def check_address(host: str, port: int) -> None:
    """Check that a server can listen on an address. Raises `InvalidRequest`."""
    from bridle.http.server.listening import check_port, try_address

    check_port(port)
    try_address(host, port)
