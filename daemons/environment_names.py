"""Which ``KAKEYA_…`` variables mean something: a misspelt one has no effect, and is worth a line.

Not an error: an environment is shared by many programs, and may be meant for a newer version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from kakeya_zmq.options import OPTIONS

PREFIX: Final = "KAKEYA_"
COMMAND_NAMES: Final = frozenset(
    {
        "KAKEYA_CONFIG",
        "KAKEYA_DASHBOARD_ALLOW_HOST",
        "KAKEYA_DASHBOARD_BIND",
        "KAKEYA_DASHBOARD_BUS",
        "KAKEYA_DASHBOARD_STATE",
        "KAKEYA_DEBUG",
        "KAKEYA_HOME",
        "KAKEYA_LAUNCH_AGENTS",
        "KAKEYA_MODEL_CACHE",
        "KAKEYA_NETWORK_API_KEY",
        "KAKEYA_NETWORK_API_KEY_FILE",
        "KAKEYA_TELEMETRY_KEY_FILE",
    }
)
"""What commands read beside the settings of daemons."""
INSTALL_NAMES: Final = frozenset(
    {
        *(f"KAKEYA_CACHE_{name}" for name in ("ADVERTISE", "BIND", "FORMAT_VERSION", "MODEL_ID", "NETWORK", "NODE_ID")),
        *(f"KAKEYA_CACHE_{name}" for name in ("PEER_ADDRESS", "PRIORITY", "QUANTIZATION")),
        *(f"KAKEYA_NETWORK_{name}" for name in ("ALLOW_HOST", "BUS", "COMMAND", "HTTP_HOST", "HTTP_PORT", "STATE")),
        *(f"KAKEYA_RUNTIME_{name}" for name in ("ADVERTISE", "BIND", "CACHE_GB", "CAPACITY", "COMMAND")),
        *(f"KAKEYA_RUNTIME_{name}" for name in ("MODEL", "NETWORK", "NODE_ID", "PEER", "PRIORITY", "PYTHON", "REPO")),
        *(f"KAKEYA_RUNTIME_{name}" for name in ("SINK", "WINDOW")),
        *(f"KAKEYA_WORKER_{name}" for name in ("ADAPTIVE_CACHE", "ADVERTISE", "BIND", "CACHE_GB", "CACHE_MIN_GB")),
        *(f"KAKEYA_WORKER_{name}" for name in ("COMMAND", "MAX_CONCURRENT_JOBS", "MAX_PROMPT_TOKENS", "MEMORY_RESERVE_GB")),
        *(f"KAKEYA_WORKER_{name}" for name in ("MODEL", "NETWORK", "NODE_ID", "PEER", "PRIORITY", "PYTHON", "REPO")),
        *(f"KAKEYA_WORKER_{name}" for name in ("RTT_MS", "SINK", "WINDOW")),
        "KAKEYA_INSTALL_RETRY_S",
        "KAKEYA_INSTALL_WAIT_S",
        "KAKEYA_LAYER_GEOMETRY_HASH",
        "KAKEYA_MODEL_REVISION",
        "KAKEYA_PYTHON",
        "KAKEYA_ROPE_HASH",
        "KAKEYA_SNAPSHOT_BYTES_PER_TOKEN",
        "KAKEYA_TOKENIZER_REVISION",
    }
)
"""What the scripts of deploy/ read, and what an earlier system's scripts did: a shell may still hold them."""
KNOWN_NAMES: Final = frozenset({*(option.variable for option in OPTIONS), *COMMAND_NAMES, *INSTALL_NAMES})


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """``suggestion``: the name that was meant, perhaps; empty when none is near."""

    name: str
    suggestion: str = ""

    def __str__(self) -> str:
        hint = f": did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.name} is not known and has no effect{hint}"


def unknown_variables(environment: Mapping[str, str] | None = None) -> tuple[UnknownVariable, ...]:
    """The variables whose names begin as ours and are none; values are not looked at. An empty one counts as not set."""
    environment = os.environ if environment is None else environment
    found = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and environment[name] and name not in KNOWN_NAMES:
            # What daemons read is meant more often than what only the install scripts do.
            near = get_close_matches(name, sorted(KNOWN_NAMES - INSTALL_NAMES), n=1, cutoff=0.8)
            near = near or get_close_matches(name, sorted(INSTALL_NAMES), n=1, cutoff=0.8)
            found.append(UnknownVariable(name, near[0] if near else ""))
    return tuple(found)
