"""What a bench measures, each in a process of its own; see daemons.bench.harness.

These modules may import the libraries that they measure (zmq, mlx, grpc, redis), which the rest of the daemons does not.
"""
