"""The report as one HTML file with its data, style and script, without external references; see docs/report.md.

`page_files/` holds the script, which `make report-page` bundles from tools/report_page and pinned packages.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import pathlib
import zlib
from typing import TYPE_CHECKING

from fuser.debug.page_data import Times, data_of

if TYPE_CHECKING:
    from fuser.debug.explanation import Explanation

_FILES = pathlib.Path(__file__).with_name("page_files")


def page(e: Explanation, title: str = "What happened to the model", times: Times | None = None) -> str:
    """The document with this title; `times` are the measured times, if any."""
    data = json.dumps(data_of(e, title, times), separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(zlib.compress(data.encode(), 6)).decode()
    style, script = _file("report.css"), _file("report.js")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head>\n<body><noscript>This page needs JavaScript.</noscript>\n"
        f'<script type="application/octet-stream" id="data">{packed}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


@functools.cache
def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8").replace("</script", "<\\/script")


__all__ = ["page"]
