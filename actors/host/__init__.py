"""The host process, and how a host's system is started and stopped."""
