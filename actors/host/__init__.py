"""One host's system: its host process, HTTP front and records, and how commands start and stop it.

Commands and ``serve`` call ``launcher``; the host process is ``process``. This package may signal
processes, bind the HTTP port, and write ``run/`` in the state dir.
"""
