from sglang_platform import choose

choose()
