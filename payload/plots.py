"""The plots of the report, as matplotlib figures without a display.

Colours go by what a bucket means: green is progress, blue is checkpointing, red to yellow is the way from a fault to
an agreed restart, purple is building up again, grey is the rest.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from payload.buckets import Piece
from payload.goodput import RunReport
from payload.recovery_marks import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[str, str] = {
    "useful": "#2f9e5b",
    "replayed": "#b5d98f",
    "checkpoint stall": "#2b6cb0",
    "drain": "#90bfe8",
    "detect": "#c92a2a",
    "teardown": "#e8743b",
    "rendezvous": "#f2b134",
    "rebuild": "#6b4fa0",
    "load": "#9c7fd1",
    "warm-up": "#cdbcec",
    "start-up": "#8a94a0",
    "data stall": "#3aa6a6",
    "other": "#d5d9de",
}
_PHASE_COLOURS: dict[str, str] = {
    "detect": COLOURS["detect"],
    "teardown": COLOURS["teardown"],
    "rendezvous": COLOURS["rendezvous"],
    "communicator": "#4b3678",
    "model": COLOURS["rebuild"],
    "load": COLOURS["load"],
    "first step": COLOURS["useful"],
    "catch up": COLOURS["replayed"],
}
_ARM_COLOURS = ("#2b6cb0", "#c92a2a", "#2f9e5b", "#6b4fa0", "#b7791f", "#3aa6a6")
_INK, _FAINT = "#1f2933", "#dfe3e8"
_STYLE: dict[str, object] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "nvrx-eks",
}
_WIDTH_IN, _HALF_WIDTH_IN = 10.5, 6.8
_CHARACTER = 0.0058
"""Width of a letter of a fault's label, as a share of the plot's."""
_FINEST = 1 / 1500
"""Share of T below which a piece is not drawn on its own."""


def name_of(report: RunReport) -> str:
    return report.arm or report.run_id


def to_svg(figure: Figure) -> str:
    """The ``<svg>`` element alone, as wide as what holds it; its text stays text."""
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", svg)


def _figure(height_in: float, width_in: float = _WIDTH_IN) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def timeline(report: RunReport) -> Figure:
    """Every rank's time by bucket, with faults and the ends of recoveries."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(0.9 + 0.34 * len(report.ranks))
        for row, rank in enumerate(report.ranks):
            for piece in merge(rank.pieces, report.duration_s * _FINEST):
                axes.barh(
                    row, piece.duration_s, 0.78, piece.begin - report.begin, color=COLOURS[piece.bucket], linewidth=0
                )
        numbers = [int(rank.source.removeprefix("rank")) for rank in report.ranks]
        num_lines = _mark_faults(axes, report, numbers)
        axes.set_yticks(range(len(numbers)), [f"rank {number}" for number in numbers])
        axes.set_ylim(len(numbers) - 0.45, -0.65 - 0.36 * num_lines)
        axes.set_xlim(0, report.duration_s)
        axes.set_xlabel("seconds since the start of the first process")
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
        axes.set_title(f"{name_of(report)}: training goodput {100 * report.training_goodput:.1f} %")
    return figure


def _mark_faults(axes: Axes, report: RunReport, ranks: Sequence[int]) -> int:
    """Returns the number of lines that the labels need."""
    ends: list[float] = []
    for recovery in report.recoveries:
        if recovery.marks[0] is None:
            continue
        begin, end = recovery.marks[0] - report.begin, recovery.marks[7]
        text = recovery.type if recovery.recovery_s is None else f"{recovery.type} {recovery.recovery_s:.1f} s"
        width_s = report.duration_s * (_CHARACTER * len(text) + 0.01)
        late = begin + width_s > report.duration_s
        left = begin - width_s if late else begin
        lane = next((i for i, taken in enumerate(ends) if taken <= left), len(ends))
        ends[lane : lane + 1] = [left + width_s]
        y = -0.62 - 0.36 * lane
        axes.plot([begin, begin], [y - 0.15, len(ranks) - 0.5], color=_INK, linewidth=0.9)
        shift, side = (-3, "right") if late else (3, "left")
        axes.annotate(
            text, (begin, y), xytext=(shift, 0), textcoords="offset points", ha=side, va="center", fontsize=7.5
        )
        if recovery.rank in ranks:
            axes.plot(begin, ranks.index(recovery.rank), "x", color=_INK, markersize=6, markeredgewidth=1.6)
        if end is not None:
            x = end - report.begin
            axes.plot([x, x], [-0.45, len(ranks) - 0.5], color=_INK, linewidth=0.6, linestyle=(0, (2, 2)))
    return max(1, len(ends))


def merge(pieces: Sequence[Piece], finest_s: float) -> list[Piece]:
    """Neighbours of one bucket as one, and pieces too short to be seen as part of the one before."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and (piece.bucket == merged[-1].bucket or piece.duration_s < finest_s):
            merged[-1] = Piece(merged[-1].begin, piece.end, merged[-1].bucket)
        elif merged and merged[-1].duration_s < finest_s:
            merged[-1] = Piece(merged[-1].begin, piece.end, piece.bucket)
        else:
            merged.append(Piece(piece.begin, piece.end, piece.bucket))
    return merged


def legend(buckets: Sequence[str]) -> Figure:
    """One line of colours for the timelines."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.3))
        FigureCanvasAgg(figure)
        patches = [Patch(color=COLOURS[bucket], label=bucket) for bucket in buckets]
        figure.legend(handles=patches, loc="center", ncols=len(patches), handlelength=1.0, columnspacing=1.1)
    return figure


def waterfall(report: RunReport, predicted: Mapping[str, float] | None = None) -> Figure:
    """From T down to useful time, one loss after the other; with a prediction, its buckets beside them.

    Args:
        predicted: seconds of the same buckets, as the planner expects them.
    """
    losses = sorted(
        (bucket for bucket in COLOURS if bucket != "useful" and _seen(report, predicted, bucket)),
        key=lambda bucket: -report.buckets[bucket],
    )
    names = ["T", *losses, "useful"]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(0.9 + 0.24 * len(names), _HALF_WIDTH_IN)
        _descend(axes, report.buckets, names, report.duration_s, -0.19 if predicted else 0.0, predicted is not None, "")
        if predicted is not None:
            _descend(axes, predicted, names, sum(predicted.values()), 0.19, True, "////")
            patches = [Patch(facecolor="#8a94a0", label="measured"), Patch(fill=False, hatch="////", label="predicted")]
            axes.legend(handles=patches, loc="lower right")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.6)
        widest = max(report.duration_s, sum(predicted.values()) if predicted else 0.0)
        axes.set_xlim(0, 1.14 * widest)
        axes.set_xlabel("seconds")
        axes.grid(axis="x")
        axes.tick_params(left=False)
        axes.set_title(f"{name_of(report)}: from T to useful time")
    return figure


def _seen(report: RunReport, predicted: Mapping[str, float] | None, bucket: str) -> bool:
    longest = max(report.buckets[bucket], predicted.get(bucket, 0.0) if predicted else 0.0)
    return longest > 0.002 * report.duration_s


def _descend(
    axes: Axes, buckets: Mapping[str, float], names: Sequence[str], total_s: float, shift: float, thin: bool, hatch: str
) -> None:
    height, left = (0.36 if thin else 0.68), total_s
    for row, name in enumerate(names):
        duration_s = total_s if name == "T" else buckets.get(name, 0.0)
        begin = 0.0 if name in ("T", "useful") else left - duration_s
        colour = "#5b6673" if name == "T" else COLOURS[name]
        face, line = ("white", 0.8) if hatch else (colour, 0.0)
        axes.barh(
            row + shift,
            duration_s,
            height,
            begin,
            facecolor=face,
            edgecolor=colour,
            hatch=hatch or None,
            linewidth=line,
        )
        left = left if name == "T" else left - duration_s
        share = f"{duration_s:.1f} s  {100 * duration_s / total_s:.1f} %"
        size = 6.5 if thin else 8
        axes.annotate(
            share,
            (begin + duration_s, row + shift),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=size,
        )


def losses(reports: Sequence[RunReport], reference: RunReport | None) -> Figure:
    """Loss of every step over that of the run without faults, and the difference below."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        curve, difference = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        expected = dict(reference.losses) if reference else {}
        if reference:
            curve.plot(*_columns(reference.losses), color="#b8c2cc", linewidth=5, label="without faults")
        for number, report in enumerate(report for report in reports if report is not reference):
            colour = _ARM_COLOURS[number % len(_ARM_COLOURS)]
            style = (number * 2.0, (3, 3))
            curve.plot(*_columns(report.losses), color=colour, linewidth=1.2, linestyle=style, label=name_of(report))
            if report.replays:
                curve.plot(*_columns(report.replays), ".", color=colour, markersize=5, alpha=0.7)
            common = [(step, loss - expected[step]) for step, loss in report.losses if step in expected]
            if common:
                difference.plot(*_columns(common), color=colour, linewidth=1.2, linestyle=style)
        _annotate_difference(difference, reports, expected)
        curve.set_ylabel("loss")
        curve.grid()
        curve.legend(loc="upper right", ncols=3)
        curve.set_title("Loss of each step; dots are steps that were replayed")
        difference.xaxis.set_major_locator(MaxNLocator(integer=True))
        difference.set_xlabel("step")
        difference.set_ylabel("difference")
        difference.grid()
    return figure


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in pairs], [loss for _, loss in pairs]


def _annotate_difference(axes: Axes, reports: Sequence[RunReport], expected: Mapping[int, float]) -> None:
    largest = max(
        (abs(loss - expected[step]) for report in reports for step, loss in report.losses if step in expected),
        default=None,
    )
    if largest is None:
        text = "no run without faults to compare with"
    else:
        text = "exactly zero at every step" if largest == 0 else f"largest: {largest:.3g}"
    axes.annotate(text, (0.99, 0.86), xycoords="axes fraction", ha="right", va="top", fontsize=8)
    if not largest:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])


def phases(reports: Sequence[RunReport]) -> Figure:
    """Every recovery as a bar of its phases, from the fault until the run has caught up."""
    lines = [(report, recovery) for report in reports for recovery in report.recoveries]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(1.2 + 0.27 * len(lines))
        for row, (_, recovery) in enumerate(lines):
            left = 0.0
            for phase, duration_s in recovery.phases_s.items():
                if duration_s:
                    axes.barh(row, duration_s, 0.72, left, color=_PHASE_COLOURS[phase], linewidth=0)
                    left += duration_s
            text = "not recovered" if recovery.recovery_s is None else f"{recovery.recovery_s:.1f} s"
            axes.annotate(text, (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5)
        names = [f"{name_of(report)}: {recovery.type} at step {recovery.step}" for report, recovery in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.margins(x=0.08)
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        axes.tick_params(left=False)
        axes.set_xlabel("seconds since the fault; the figure beside a bar is fault to first step")
        patches = [Patch(color=_PHASE_COLOURS[phase], label=phase) for phase in PHASES]
        axes.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(patches), handlelength=1.0)
    return figure
