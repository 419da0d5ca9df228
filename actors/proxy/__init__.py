"""The proxy: one actor per host, the shell around the router.

``proxy`` takes messages, ``dispatcher`` runs the router and performs its effects,
``controller_link`` gets the tables, and ``reports`` and ``metrics`` observe the router. The
decisions are in core/routing. Nothing here is hard state.
"""
