"""Protocols of the field, which turn a class into what their clients expect.

Each is a decorator that gives a class an ASGI app, as ``serve.ingress`` does; the app runs in the
class's replicas and is imported there alone. They may use the replica's context and ``core``.
"""
