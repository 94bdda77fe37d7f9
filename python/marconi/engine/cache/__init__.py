"""The cache of a scheduler: SGLang's unified radix cache, and its tree core, on this project's tree and policies."""
