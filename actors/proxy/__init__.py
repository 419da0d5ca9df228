"""The proxy: one actor per host, which holds the router."""
