"""Requests to other servers, made with distrust: to addresses that were checked, bounded in size and time. The caller
decides which addresses are allowed. Knows neither tools nor images."""

from bridle.safe_http.addresses import Networks, is_allowed, networks_of
from bridle.safe_http.exchange import HttpExchange, HttpLimits, HttpResponse
from bridle.safe_http.failure import OutboundFailed
from bridle.safe_http.target import HttpTarget, is_winding

__all__ = [
    "HttpResponse",
    "HttpLimits",
    "HttpExchange",
    "Networks",
    "OutboundFailed",
    "HttpTarget",
    "is_allowed",
    "is_winding",
    "networks_of",
]
