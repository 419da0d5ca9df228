"""The decisions: functions and values, without I/O, processes or clocks.

Only ids of what they create do not come from their callers: ``secrets`` draws them.
"""
