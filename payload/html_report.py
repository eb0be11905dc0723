"""The comparison as one self-contained HTML page: tables, and plots as inlined SVG. It loads nothing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload import plots
from payload.buckets import BUCKETS
from payload.goodput import RunReport
from payload.report import label, percent, rows, seconds, versions

_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --faint: #e4e7eb; --soft: #616e7c; --accent: #2f9e5b; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 20px 48px; color: var(--ink); background: #fff;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 30px 0 8px; }
p { margin: 4px 0 10px; color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0 4px; }
.card { flex: 1 1 180px; border: 1px solid var(--faint); border-radius: 8px; padding: 10px 12px; }
.card b { display: block; font-size: 13px; } .card .big { font-size: 26px; font-weight: 600; line-height: 1.2; }
.card small { color: var(--soft); display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--ink); }
tr.section td { border-top: 1px solid #9aa5b1; } tr.published td { color: var(--soft); font-style: italic; }
td.yes { color: var(--accent); font-weight: 600; } td.no { color: #c92a2a; font-weight: 600; }
figure { margin: 6px 0 14px; } svg { display: block; height: auto; max-width: 100%; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif !important; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 6px 18px; }
.warn { color: #9c4221; }
footer { margin-top: 30px; color: var(--soft); font-size: 12px; border-top: 1px solid var(--faint); padding-top: 8px; }
"""


def write_html(
    path: Path,
    reports: Sequence[RunReport],
    *,
    equal: Mapping[str, bool],
    reference: RunReport | None = None,
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "Training under faults",
) -> None:
    """Writes the page, whole or not at all.

    Args:
        equal: run id -> whether the final weights equal the reference's.
        reference: the run without faults, under the others' loss curves.
        predicted: run id -> seconds of each bucket, as the planner expects them.
    """
    page = render(reports, equal, reference, predicted or {}, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)


def render(
    reports: Sequence[RunReport],
    equal: Mapping[str, bool],
    reference: RunReport | None,
    predicted: Mapping[str, Mapping[str, float]],
    title: str,
) -> str:
    """The text of the page."""
    body = [
        f"<h1>{html.escape(title)}</h1>",
        "<p>Every figure is computed from the event logs of the runs. Of each step only its last execution is useful; "
        "T runs from the first process to durable completion.</p>",
        _cards(reports, equal),
        *_notes(reports),
        "<h2>Comparison</h2>",
        _table(reports, equal),
        "<h2>Timeline of each rank</h2>",
        f"<figure>{plots.to_svg(plots.legend(_seen_buckets(reports)))}</figure>",
        "<p>A cross marks the rank that a fault hits; the dashed line is the first step done after it.</p>",
        *(f"<figure>{plots.to_svg(plots.timeline(report))}</figure>" for report in reports),
    ]
    if any(report.recoveries for report in reports):
        body += [
            "<h2>Phases of each recovery</h2>",
            "<p>Where processes are started anew, their start and imports are part of the communicator phase.</p>",
            f"<figure>{plots.to_svg(plots.phases(reports))}</figure>",
        ]
    falls = (plots.waterfall(report, predicted.get(report.run_id)) for report in reports)
    body += [
        "<h2>Where the time went</h2>",
        _bucket_table(reports),
        '<div class="grid">',
        *(f"<figure>{plots.to_svg(fall)}</figure>" for fall in falls),
        "</div>",
        "<h2>Loss</h2>",
        f"<figure>{plots.to_svg(plots.losses(reports, reference))}</figure>",
        f"<footer>Versions that ran: {html.escape(versions(reports))}. Rows in italics follow the formulas of the "
        "published article and are shown for comparison only.</footer>",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{view}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def _seen_buckets(reports: Sequence[RunReport]) -> list[str]:
    return [bucket for bucket in BUCKETS if any(report.buckets[bucket] > 0 for report in reports)]


def _cards(reports: Sequence[RunReport], equal: Mapping[str, bool]) -> str:
    cards = []
    for report in reports:
        times = [recovery.recovery_s for recovery in report.recoveries if recovery.recovery_s is not None]
        slowest = f"slowest recovery {seconds(max(times))}" if times else "no failure"
        same = {True: "final weights equal", False: "final weights differ", None: ""}[equal.get(report.run_id)]
        cards.append(
            f'<div class="card"><b>{html.escape(label(report))}</b>'
            f'<span class="big">{percent(report.training_goodput)}</span><small>training goodput</small>'
            f"<small>{slowest}</small><small>{same}</small></div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _notes(reports: Sequence[RunReport]) -> list[str]:
    return [
        f'<p class="warn">{html.escape(label(report))}: partial report: {html.escape(report.note)}</p>'
        for report in reports
        if not report.complete
    ]


def _table(reports: Sequence[RunReport], equal: Mapping[str, bool]) -> str:
    lines, section = [], ""
    for row in rows(reports, equal):
        kinds = " ".join(
            name for name, on in (("section", section and row.section != section), ("published", row.published)) if on
        )
        section = row.section
        cells = "".join(_cell(row.label, cell) for cell in row.cells)
        lines.append(f'<tr class="{kinds}"><td>{html.escape(row.label)}</td>{cells}</tr>')
    return _wrap(reports, lines)


def _cell(name: str, cell: str) -> str:
    kind = f' class="{cell}"' if name == "final weights equal" and cell in ("yes", "no") else ""
    return f"<td{kind}>{html.escape(cell)}</td>"


def _bucket_table(reports: Sequence[RunReport]) -> str:
    lines = []
    for bucket in _seen_buckets(reports):
        cells = "".join(
            f"<td>{r.buckets[bucket]:.2f} s &nbsp; {100 * r.buckets[bucket] / r.duration_s:.1f} %</td>" for r in reports
        )
        lines.append(f'<tr><td title="{html.escape(BUCKETS[bucket])}">{bucket}</td>{cells}</tr>')
    total = "".join(f"<td>{report.duration_s:.2f} s &nbsp; 100.0 %</td>" for report in reports)
    return _wrap(reports, [*lines, f'<tr class="section"><td>sum = T</td>{total}</tr>'])


def _wrap(reports: Sequence[RunReport], lines: Sequence[str]) -> str:
    heads = "".join(f"<th>{html.escape(label(report))}</th>" for report in reports)
    table = f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
