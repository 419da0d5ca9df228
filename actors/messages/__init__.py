"""The messages between processes: frozen dataclasses, grouped by their senders and receivers."""
