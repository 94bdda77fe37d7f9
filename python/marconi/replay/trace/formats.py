"""The formats that can be read. A file is of the first one that recognises the beginning of its first document.

To add a format: a file with its `base.Reader`, which goes into `_ORDER`, and a test with a small sample. Formats of
single data sets are found by their entry point (`extensions.py`), those of this distribution in `marconi_lab/trace`.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from marconi.extensions import TRACE_FORMATS, installed
from marconi.policy.request import Trace
from marconi.replay.trace.artifact import ARTIFACT
from marconi.replay.trace.base import Progress, Reader, ReadOptions, ReadProgress, check_used
from marconi.replay.trace.mooncake import MOONCAKE
from marconi.replay.trace.openai import OPENAI
from marconi.replay.trace.sglang_log import SGLANG_LOG
from marconi.replay.trace.source import Source, source_at

_ORDER: tuple[Reader, ...] = (SGLANG_LOG, OPENAI, ARTIFACT, MOONCAKE)
_MOST_BYTES = 1 << 28
"""The length of a document's beginning that is looked at for its shape."""


@cache
def readers() -> Mapping[str, Reader]:
    """By name; a format of a single data set, which knows its own, is asked first."""
    beside = [reader for found in installed(TRACE_FORMATS) for reader in found]
    return MappingProxyType({reader.name: reader for reader in (*beside, *_ORDER)})


def read(
    path: str | os.PathLike[str],
    options: ReadOptions | None = None,
    *,
    format: str | None = None,  # noqa: A002
    progress: Progress | None = None,
    on_bad: Callable[[str], None] | None = None,
    on_remark: Callable[[str], None] | None = None,
) -> Trace:
    """The trace at `path`, in the format named or the one that its beginning shows; `-` is stdin.

    `progress` is called with the records done and, where known, their total. With `on_bad`, a record that is malformed
    is reported to it in one line and left out; without, the first one is raised. `on_remark` is called with one line of
    what makes the trace approximate. `ValueError`, in one line, for a bad record, a file that is missing, empty,
    damaged or of no known format, a trace without a request, and (as `UnusedOption`) an option that does nothing for
    the format.
    """
    if format is not None and format not in readers():
        raise ValueError(f"a format must be one of {', '.join(readers())}, got {format!r}")
    if not os.fspath(path):
        raise ValueError("the trace must be a file or a folder, got no name")
    options = options or ReadOptions()
    watch = ReadProgress(progress, on_bad, on_remark)
    with source_at(os.fspath(path)) as source:
        head = source.head()
        found = (reader for reader in readers().values() if reader.recognises(head))
        reader = readers()[format] if format is not None else next(found, None)
        if reader is None:
            raise ValueError(f"{source.place}: of no known format ({', '.join(readers())})")
        check_used(reader, options)
        try:
            trace = reader.read(source, options, watch)
        except ValueError:
            check_shape(source, reader)
            raise
        finally:
            watch.say_noted()
    watch.finish()
    return trace


def check_shape(source: Source, reader: Reader) -> None:
    """`ValueError` where the first document is sound JSON, but not the one object a line that `reader` reads."""
    if not reader.is_of_lines:
        return
    for document in source.documents():
        text = document.read(_MOST_BYTES).decode(errors="replace").removeprefix("\ufeff").lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return
        if isinstance(value, list) or (isinstance(value, dict) and "\n" in text[:end]):
            is_list = isinstance(value, list)
            shape = "one array" if is_list else "an object over several lines"
            raise ValueError(
                f"{document.name}: must be one JSON object a line, got sound JSON of another shape, {shape}: "
                f"`jq -c {'.[]' if is_list else '.'}` writes such lines"
            )
        return
