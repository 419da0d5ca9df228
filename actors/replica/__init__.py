"""The replica: one actor that runs one copy of the user's code."""
