"""From a request's JSON body to the token ids that its worker makes of it."""

from marconi.router.prompts.base import PromptReader, Reading
from marconi.router.prompts.check import Probe, probes, verify
from marconi.router.prompts.reader import TokenizingReader

__all__ = ["Probe", "PromptReader", "Reading", "TokenizingReader", "probes", "verify"]
