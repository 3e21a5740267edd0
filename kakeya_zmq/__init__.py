"""The domain: KV blocks, the store, the protocol machines, the model engine and the sockets that join them."""

__version__ = "0.1.0"
