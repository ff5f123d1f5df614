"""The HTTP front-end: the OpenAI API, health, metrics and a page for browsers, over `bridle.service`."""

from bridle.http.app import create_app
from bridle.http.server import serve
from bridle.http.settings import HttpSettings, ServeSettings

__all__ = ["HttpSettings", "ServeSettings", "create_app", "serve"]
