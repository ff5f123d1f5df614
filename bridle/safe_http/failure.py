"""Why a request to another server was not made, or has no answer."""


class OutboundFailed(Exception):
    """One sentence that a client may read; whoever asked makes an error of its own kind of it."""
