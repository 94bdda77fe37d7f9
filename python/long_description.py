"""The README as the long description of what is built, which a reader has without the other files of the project.

A relative link leads to `Source` of `[project.urls]`; while that is not known, its text alone remains, and no picture.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)")


def long_description(readme: str, source: str | None) -> str:
    """`readme` with its relative links into the repository at the address `source`, or without links."""

    def replaced(link: re.Match[str]) -> str:
        if source is not None:
            kind = "raw" if link["picture"] else "blob"
            return f"{link['picture']}[{link['text']}]({source}/{kind}/HEAD/{link['target']})"
        return "" if link["picture"] else link["text"]

    return _RELATIVE_LINK.sub(replaced, readme)


class LongDescription(MetadataHookInterface):
    """Hatchling's hook for the dynamic `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": long_description(readme, source)}
