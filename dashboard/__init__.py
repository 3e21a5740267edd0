"""Faces of the fleet that listen to its telemetry bus: the JSON API with its page, metrics, and the terminal monitor."""
