"""The tree behind SGLang's unified radix cache: this project's tree and policies under its tree-core interface."""
