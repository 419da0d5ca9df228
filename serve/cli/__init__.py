"""The command ``greenroom``."""
