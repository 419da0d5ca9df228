"""The key-value store interface, the stores in memory and on disk, and checkpoints over them."""
