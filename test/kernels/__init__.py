"""The operators of `sgl_kernel_ext`, held against recurrences that are written down token by token."""

from sglang_platform import choose

choose()
