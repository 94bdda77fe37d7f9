"""Copies of states between the slots of a pool."""

from sgl_kernel_ext.state_copy.reference import copy

__all__ = ["copy"]
