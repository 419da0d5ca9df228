"""The replica: one actor that runs one copy of the user's code.

The controller starts and stops it (``actor``). Proxies and callers send it queries
(``data_plane``), which run in ``user_code``. What user code may ask of us goes through
``context``. It may use ``core``, ``actors.runtime``, ``actors.messages`` and ``actors.caller``.
"""
