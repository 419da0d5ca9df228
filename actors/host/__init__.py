"""One host's system: its processes, and how commands start and stop it.

Commands and ``serve`` call ``launcher``. The host process is ``process``; ``front`` keeps up the
HTTP front and the gRPC server. This package may signal processes, bind the HTTP port, and write
``run/`` in the state dir. No other package of ``greenroom.actors`` imports it.
"""
