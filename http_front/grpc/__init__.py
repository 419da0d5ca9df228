"""gRPC: a server in a process of its own, which the host process keeps up beside the HTTP front.

Imported by that process alone, which has the extra ``grpc``.
"""
