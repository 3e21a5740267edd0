"""Composition roots: one process each, and the ``kakeya`` command. No protocol logic lives here."""
