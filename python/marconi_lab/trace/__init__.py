"""Readers of single data sets, and of formats that no server or API writes."""

from typing import Final

from marconi.replay.trace.base import Reader
from marconi_lab.trace.agent_text import AGENT_TEXT
from marconi_lab.trace.azure import AZURE
from marconi_lab.trace.bailian import BAILIAN
from marconi_lab.trace.coding_agent import CODING_AGENT
from marconi_lab.trace.sharegpt import SHAREGPT

READERS: Final[tuple[Reader, ...]] = (CODING_AGENT, SHAREGPT, BAILIAN, AGENT_TEXT, AZURE)
