"""The command ``greenroom``: ``main`` has the table of its commands, and the others are these."""
