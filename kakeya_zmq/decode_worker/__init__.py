"""The decode worker boundary: an engine whose model lives in a child process that may crash, hang and be replaced.

``journal`` and ``restarts`` are pure; ``messages`` and ``channel`` are what parent and child say to each other; ``engine``
is the parent's side (an :class:`kakeya_zmq.engine.Engine`), ``process`` its hold on the child, ``serve`` the child's loop.
"""
