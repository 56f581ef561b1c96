"""Who a process is, so that a record it left can be told from a living owner."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """pid, host and start time: a pid alone is used again."""
    process = psutil.Process(os.getpid())
    return {"pid": process.pid, "host": socket.gethostname(), "started": process.create_time()}


def is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the recorded process may still run; one on another host may."""
    if record["host"] != socket.gethostname():
        return True
    try:
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["started"]) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
