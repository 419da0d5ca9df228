"""Thespian's stock TCP base, selected by ``GREENROOM_TRANSPORT=stock`` to compare ours with it.

Its loop blocks, so asyncio is a guest here: see :mod:`greenroom.actors.stock.guest` for actors and
:mod:`greenroom.actors.stock.outside` for the other processes. Nothing outside this folder knows.
"""
