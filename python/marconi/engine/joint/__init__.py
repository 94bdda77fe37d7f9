"""One pool for KV and states: SGLang's `--enable-unified-memory` under this project's cache."""
