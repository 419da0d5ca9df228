"""Thespian's stock TCP base, selected by ``UNDERSTUDY_TRANSPORT=stock`` to compare ours with it.

Its loop blocks, so asyncio is a guest here: see :mod:`understudy.actors.stock.guest` for actors and
:mod:`understudy.actors.stock.outside` for the other processes. Nothing outside this folder knows.
"""
