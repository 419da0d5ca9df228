"""The router's decisions: which backend, which replica, queueing, limits, retries, mirroring.

A proxy holds one ``Router``, calls it with what callers and replicas send, and performs the effects
that it returns. What only follows queries observes it (``Observer`` in tickets.py). Pure: values
and functions, no I/O, no clock, no randomness of its own. It uses nothing else of the core but the
errors. Dispatch leases will count as tickets do in ``balancing``, and be revoked where ``router``
queues a ticket, takes a table, or hears that a replica drains.
"""
