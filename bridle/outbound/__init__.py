"""Requests to other servers, made with distrust: to addresses that were checked, bounded in size and time. What may be
asked for is decided by who asks. Knows neither tools nor pictures."""

from bridle.outbound.addresses import Networks, is_allowed, networks_of
from bridle.outbound.exchange import Answer, Bounds, Exchange
from bridle.outbound.failure import OutboundFailed
from bridle.outbound.target import Target, is_winding

__all__ = [
    "Answer",
    "Bounds",
    "Exchange",
    "Networks",
    "OutboundFailed",
    "Target",
    "is_allowed",
    "is_winding",
    "networks_of",
]
