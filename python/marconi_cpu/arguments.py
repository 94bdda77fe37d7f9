"""Refusal of arguments that a replaced launcher takes and its operator has no counterpart for, by name."""


def require_absent(launcher: str, **arguments: object) -> None:
    """Raise NotImplementedError naming those of `arguments` that are neither None nor False."""
    given = [name for name, value in arguments.items() if value is not None and value is not False]
    if given:
        raise unsupported(launcher, ", ".join(given))


def unsupported(launcher: str, what: str) -> NotImplementedError:
    """The error for `launcher` being called with `what`."""
    return NotImplementedError(f"{launcher} on the CPU platform does not support {what}")
