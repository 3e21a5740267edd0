"""The wire: bytes and their meaning. No sockets, no clock, no KV arrays, no model."""
