"""Mooncake's package, as far as SGLang's store imports it."""
