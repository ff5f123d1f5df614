"""A safe HTTP client for untrusted servers: it connects only to checked addresses, with limits on size and time. The
caller decides which addresses are allowed."""

from bridle.safe_http.addresses import Networks as Networks
from bridle.safe_http.addresses import OutboundFailed as OutboundFailed
from bridle.safe_http.addresses import is_allowed as is_allowed
from bridle.safe_http.addresses import networks_of as networks_of
from bridle.safe_http.exchange import HttpExchange as HttpExchange
from bridle.safe_http.exchange import HttpLimits as HttpLimits
from bridle.safe_http.exchange import HttpResponse as HttpResponse
from bridle.safe_http.target import HttpTarget as HttpTarget
from bridle.safe_http.target import is_winding as is_winding
