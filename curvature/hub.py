"""Whether the model hub can be asked."""

from __future__ import annotations

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import constants

__all__ = ["hub_reachable"]


@cache
def hub_reachable() -> bool:
    """Whether the hub answers at all.

    Asked before its client is, which without a network retries for half a minute. Behind a proxy, where a direct
    connection says nothing, the answer is yes. Offline mode (`HF_HUB_OFFLINE=1`) is a no.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    address = urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=5):
            return True
    except OSError:
        return False
