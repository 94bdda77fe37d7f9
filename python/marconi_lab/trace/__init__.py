"""Readers of single data sets, and of formats that no server or API writes."""

from typing import Final

from marconi.replay.trace.base import Reader
from marconi_lab.trace.agent_text import AgentText
from marconi_lab.trace.azure import Azure
from marconi_lab.trace.bailian import Bailian
from marconi_lab.trace.coding_agent import CodingAgent
from marconi_lab.trace.sharegpt import ShareGPT

READERS: Final[tuple[Reader, ...]] = (CodingAgent(), ShareGPT(), Bailian(), AgentText(), Azure())
