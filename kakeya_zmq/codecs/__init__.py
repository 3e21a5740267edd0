"""Storage codecs (what the canonical bytes of a part are) and link codecs (how bytes travel or lie on disk)."""
