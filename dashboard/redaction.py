"""What of a text may be seen without the API key. Nothing is searched for bad words: a text is shown when it is known.

Node ids are aliases and public. A name that some node tells of another one is shown when such a node is known. Free text
(reasons, log lines) is replaced by a word of a closed vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

OTHER: Final = "other"
_LABEL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,31}")
_DESCRIPTION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+()-]{0,63}")
_IDENTIFIER: Final = re.compile(r"(?:[0-9a-f]{16}){1,2}")
"""What nodes draw for a request (8 bytes) or a job (16), in hexadecimal digits."""
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_MODEL: Final = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*")
_OPTIONS: Final = (
    "wait for another session",
    "stay with",
    "compute here",
    "compute",
    "import",
    "fetch",
    "worker",
    "alone",
    "cache",
)
"""How the options of a decision begin; a node's name may follow."""
REASONS: Final = (
    ("diverged", "diverged"),
    ("not compatible", "not compatible"),
    ("too few to ask", "too short"),
    ("import limit", "over the import limit"),
    ("damaged", "damaged"),
    ("checksum", "damaged"),
    ("evicted", "evicted"),
    ("timed out", "timed out"),
    ("had not answered", "timed out"),
    ("deadline", "timed out"),
    ("too late", "timed out"),
    ("stall", "stalled"),
    ("too slow", "too slow"),
    ("cancel", "cancelled"),
    ("no room", "no room"),
    ("queue", "queue full"),
    ("refused", "refused"),
    ("no worker", "nobody to ask"),
    ("restarted", "node restarted"),
    ("is gone", "node gone"),
    ("was not heard", "end not heard"),
    ("lost", "connection lost"),
    ("ends at token", "cache ends"),
    ("nothing cached is known", "cache ends"),
    ("were not used", "not used"),
    ("workers are excluded", "nobody to ask"),
    ("does not pay", "does not pay"),
    ("never stored", "never stored"),
    ("prepared for another session", "shared"),
    ("backing off", "passed over"),
    ("bulk port", "bulk port blocked"),
    ("local-only", "policy"),
    ("policy", "policy"),
)
"""(what a reason holds, the kind it is told as); the first one that fits counts."""


def reason_kind(text: str) -> str:
    """The kind of a reason; "" for none."""
    if not text:
        return ""
    lowered = text.lower()
    return next((kind for part, kind in REASONS if part in lowered), OTHER)


def label(text: str) -> str:
    """A short technical name as it is; anything else as "other", nothing as ""."""
    return text if not text or _LABEL.fullmatch(text) else OTHER


def model_name(text: str) -> str:
    """A model id; of one that is a path, the last part. What could be an address with a port, or prose, is no model id."""
    path = text.startswith(("/", "~", ".", "\\")) or "\\" in text or text[1:2] == ":"
    name = re.split(r"[/\\]", text.rstrip("/\\"))[-1] if path else text
    return name if not name or _MODEL.fullmatch(name) else OTHER


@dataclass(frozen=True, slots=True)
class Eyes:
    """Who looks. ``admin``: with the API key; ``known``: the node ids that may be shown."""

    admin: bool
    known: Collection[str]

    def secret(self, text: str) -> str:
        """An address, a tenant or free text."""
        return text if self.admin else ""

    def description(self, text: str) -> str:
        """What a node says of its software or hardware: words, numbers, versions; no paths, no addresses with a port."""
        return text if self.admin or not text or _DESCRIPTION.fullmatch(text) else OTHER

    def identifier(self, text: str) -> str:
        """The random name of a job or request."""
        return text if self.admin or not text or _IDENTIFIER.fullmatch(text) else OTHER

    def fingerprint(self, text: str) -> str:
        """The name of a namespace, a digest of model and settings."""
        return text if self.admin or not text or _FINGERPRINT.fullmatch(text) else OTHER

    def label(self, text: str) -> str:
        return text if self.admin else label(text)

    def node(self, name: str) -> str:
        """A node that another one names."""
        return name if self.admin or not name or name in self.known else OTHER

    def option(self, text: str) -> str:
        """An option of a decision: "compute", "worker NAME"."""
        if self.admin:
            return text
        if not text:
            return ""
        option = next((option for option in _OPTIONS if text == option or text.startswith(f"{option} ")), None)
        if option is None:
            return OTHER
        name = text[len(option) + 1 :]
        return f"{option} {self.node(name)}" if name else option
