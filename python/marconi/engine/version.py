"""Which SGLang this project was verified on, and the refusal to run on any other.

The plugin reaches into SGLang beyond its public interface (`plugin/upstream.toml` lists where), so a release that
nobody looked at may serve wrong tokens without an error. Refusing is the only safe default.
"""

from collections.abc import Mapping

from marconi import __version__

VERIFIED_SGLANG = ("0.5.23",)
OVERRIDE_ENV = "MARCONI_ALLOW_UNVERIFIED_SGLANG"


class Refusal(ValueError):
    """The operator asked for something that cannot be served; the message is one line that says what would be."""


def one_line(error: BaseException, max_chars: int = 400) -> str:
    """The message of `error` on one line of at most about `max_chars`, with its type unless it is a refusal."""
    text = " ".join(str(error).split())
    if len(text) > max_chars:
        text = text[:max_chars] + " ..."
    if isinstance(error, Refusal) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require_verified(installed: str, environ: Mapping[str, str]) -> None:
    """Raise `Refusal` unless `installed` (SGLang's version) was verified or the override is set to 1."""
    if installed in VERIFIED_SGLANG or environ.get(OVERRIDE_ENV) == "1":
        return
    raise Refusal(
        f"sglang-marconi {__version__} was verified on SGLang {', '.join(VERIFIED_SGLANG)}, found {installed}: "
        f"install sglang=={VERIFIED_SGLANG[-1]}, or set {OVERRIDE_ENV}=1 to run unverified"
    )
