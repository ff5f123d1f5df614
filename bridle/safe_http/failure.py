"""Why a request to another server was not made, or has no answer."""


class OutboundFailed(Exception):
    """One sentence that a client may read; the caller makes its own kind of error from it."""
