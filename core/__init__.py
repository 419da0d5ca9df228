"""The decisions: pure functions and values, without I/O, processes or clocks."""
