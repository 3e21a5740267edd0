"""The protocol machines: pure state machines, one a file; no sockets, threads, clocks or randomness of their own.

A machine is ``on(event, now) -> list[Effect]`` plus ``deadline() -> float | None`` (seconds on the caller's monotonic
clock; when it passes, the host calls ``on(Tick(), now)``). The host turns effects into sends, lanes and engine commands.
"""
