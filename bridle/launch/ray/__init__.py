"""bridle on a Ray cluster: an application for Ray Serve, which places, scales, replaces and updates engines.

    serve run deploy/ray.yaml

The deployment `fronts` serves HTTP. The deployment `engines` has replicas of one model, each with its own weights and
KV cache. A front sends a request to the engine that has computed the prompt's prefix. If an engine is lost, another
engine continues its requests. Needs the extra `ray`; Ray is imported only when an application is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridle.distribution import install_hint
from bridle.errors import UnsupportedFeature
from bridle.launch.ray.settings import RaySettings

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["RaySettings", "build_app"]


def build_app(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve configuration file, which are the fields of `RaySettings`."""
    from bridle.launch.ray.files import read_files

    settings = RaySettings.parse(args)
    files = read_files(settings)
    try:
        from bridle.launch.ray.app import build
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise UnsupportedFeature(f"Ray Serve is not installed; {install_hint('ray')}", "ray") from None
    return build(settings, files)
