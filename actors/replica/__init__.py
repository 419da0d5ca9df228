"""The replica: one actor that runs one copy of the user's code.

The controller starts and stops it (``replica``). Proxies and callers send it queries
(``data_plane``), which run in ``user_code``, by the methods of what the code has made of itself
(``servable``). User code asks about its query and its replica through ``context``. This package may
use ``core``, ``actors.environments``, ``actors.runtime``, ``actors.messages`` and
``actors.caller``.
"""
