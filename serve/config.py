"""The settings that users write down, under the names Ray Serve's users know."""

from understudy.core.config import ActorOptions, BackendConfig, HTTPOptions

__all__ = ["ActorOptions", "BackendConfig", "HTTPOptions"]
