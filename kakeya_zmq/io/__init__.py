"""Sockets and threads: the only folder that imports zmq."""
