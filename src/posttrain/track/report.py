"""Writes `report.html`: one file that shows a whole run and opens offline.

The page is `report_template.html` with `report.css`, `report.js` and the run's data put in their places. Completions are
untrusted text: they reach the page only inside JSON whose markup characters are escaped, and the script only ever sets them as
text, never as markup.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from posttrain.track.report_data import page_data, read_run, sample_details
from posttrain.track.sinks import finite

_HERE = Path(__file__).parent


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the run's metrics, events, samples and configuration; replaces an earlier one.

    Raises:
        ReportError: for a directory that is no run, or a run without one complete step.
    """
    files = read_run(run_dir)
    details = "\n".join(_json_script(f"samples-{stem}", sample_details(groups)) for stem, groups in files.samples.items())
    page = page_data(files)
    parts = {
        "title": _text(f"{page['run']['name']} · posttrain"),
        "css": _asset("report.css"),
        "data": _json_script("run-data", page),
        "details": details,
        # charts first, the page's own code last: plain scripts share one scope
        "js": "\n".join(_asset(name) for name in ("report_charts.js", "report_groups.js", "report.js")),
    }
    # one pass over the template's own marks: a mark inside the data is data
    pieces = _asset("report_template.html").split("@@")
    html = "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))
    path = run_dir / "report.html"
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, path)  # a reader never sees half a page
    return path


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _json_script(element_id: str, data: object) -> str:
    """A data block that no content can close early: `<`, `>` and `&` only occur as JSON escapes."""
    text = json.dumps(finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{element_id}">{text}</script>'


def _text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
