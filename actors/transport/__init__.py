"""Our own system base for Thespian: its processes, and messages between them; see docs/."""
