"""What a user imports: ``from understudy import serve``."""
