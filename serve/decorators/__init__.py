"""Decorators for a deployment's methods: ``serve.batch`` and ``serve.multiplexed``.

User code calls what they leave, inside replicas. They may use ``core`` and the replica's context.
"""
