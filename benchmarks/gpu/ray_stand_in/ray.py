"""Stands for Ray where verl's update is measured on a machine without Ray, and nowhere else.

verl 0.9.1 imports Ray with its data protocol and names one class of it in a type check. Its update on one rank, which is what
``benchmarks/update_pass`` calls, never starts Ray.
"""


class ObjectRef:
    """What a remote call gives back. Nothing here makes one."""
