"""The brain of a router: what is known of a request and of the workers, brought together into one decision."""

from marconi.router.dispatch.base import Prompt, Ticket
from marconi.router.dispatch.dispatcher import Dispatcher

__all__ = ["Dispatcher", "Prompt", "Ticket"]
