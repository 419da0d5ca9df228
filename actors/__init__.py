"""Thespian actors, their messages, and the processes that carry them."""
