"""The admin API over HTTP, and the dashboard: for operators, and imported when one comes.

What it answers is the controller's. A worker asks it over its own link.
"""
