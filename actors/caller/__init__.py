"""The caller's side of queries: HTTP workers, replicas with handles, and scripts use it.

``caller`` sends queries and takes answers; ``streams`` and ``uploads`` carry whatever travels in
parts, at both ends; handles call ``client``; a script has a ``connection``, for requests to the
controller too. This package may use ``core``, ``actors.runtime`` and ``actors.messages``.
"""
