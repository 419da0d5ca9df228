"""The caller's side of queries: HTTP workers, replicas with handles, and scripts use it.

``caller`` sends queries and takes answers; ``streams`` and ``uploads`` carry what travels in parts,
also for the replica's end; ``client`` is what handles call. It may use ``core``,
``actors.runtime`` and ``actors.messages``.
"""
