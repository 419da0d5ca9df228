"""What travels between processes: frozen dataclasses, in one place, by who speaks."""
