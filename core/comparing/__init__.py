"""Comparing the answers of two versions (``comparing``), and their latencies (``latencies``).

Pure, except for the user's compare function.
"""
