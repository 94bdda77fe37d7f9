"""Where the states at the ends of requests stand in a step over drafts, and where they go."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.draft_ends import reference
from sgl_kernel_ext.draft_ends.reference import new

__all__ = ["find", "new"]

find = launch.by_device(reference.find, f"{__name__}.kernel")
