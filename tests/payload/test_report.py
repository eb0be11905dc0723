"""The comparison: what the table says, and a page that stands alone."""

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from payload import plots, report
from payload.buckets import BUCKETS, Piece
from payload.cli import COMMANDS
from payload.goodput import RunReport, analyse
from payload.html_report import write_html
from tests.payload.run_builder import RunBuilder, in_job_run, in_process_run, kubernetes_run, straight_run

SCRIPTS = [straight_run, in_process_run, kubernetes_run, in_job_run]


def folder(script: Callable[[Path], RunBuilder], tmp_path: Path) -> Path:
    return script(tmp_path / script.__name__.replace("_", "-")).write()


@pytest.fixture
def reports(tmp_path: Path) -> list[RunReport]:
    return [analyse(folder(script, tmp_path)) for script in SCRIPTS]


def printed(runs: list[RunReport], equal: dict[str, bool]) -> dict[str, list[str]]:
    text = io.StringIO()
    console = Console(width=180, file=text)
    report.print_comparison(runs, equal=equal, console=console)
    lines = [line.split("\u2502")[1:-1] for line in text.getvalue().splitlines() if "\u2502" in line]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_table_says_everything_of_each_arm(reports: list[RunReport]) -> None:
    equal = report.equality(reports, reports[0])
    table = printed(reports, equal)
    assert table["training goodput"][1:] == ["41.7 %", "23.2 %", "44.8 %"]
    assert table["infrastructure goodput (strict)"][1:] == ["45.9 %", "25.6 %", "49.3 %"]
    assert table["exception x1, mean / max"][:3] == ["-", "3.35 s / 3.35 s", "7.25 s / 7.25 s"]
    assert table["hang x1, mean / max"][2] == "37.6 s / 37.6 s"
    assert table["sigkill x1, mean / max"][3] == "9.15 s / 9.15 s"
    assert table["container restarts"] == ["0", "0", "4", "0"]
    assert table["pod replacements"] == ["0"] * 4
    assert table["worker restarts (in-job)"] == ["0", "0", "0", "1"]
    assert table["replayed steps"] == ["0", "2", "2", "2"]
    assert table["back-off, raw / compressed"][2] == "20.0 s / 1.00 s"
    assert table["final weights equal"] == ["yes"] * 4


def test_what_follows_the_published_formulas_is_marked(reports: list[RunReport]) -> None:
    made = report.rows(reports, {})
    assert {row.label for row in made if row.published} == {row.label for row in made if "published" in row.label}
    assert sum(row.published for row in made) == 2 + 3  # two goodputs, three fault types


def test_numbers_of_faults_that_differ_are_said_in_each_cell(tmp_path: Path) -> None:
    one, two = RunBuilder(tmp_path / "one"), RunBuilder(tmp_path / "two")
    for num_faults, run in enumerate((one, two), start=1):
        run.begin()
        run.steps(1, 2)
        for step in range(3, 3 + num_faults):
            run.fault("exception", 1, step)
            run.leave_in_process(0.5)
            run.enter(step - 1)
            run.steps(step, step)
        run.finish(2 + num_faults)
    table = printed([analyse(run.write()) for run in (one, two)], {})
    assert [cell.rpartition(" ")[2] for cell in table["exception, mean / max"]] == ["x1", "x2"]


def test_four_arms_fit_the_width(reports: list[RunReport]) -> None:
    text = io.StringIO()
    report.print_comparison(reports, equal={}, console=Console(width=120, file=text))
    lines = [line for line in text.getvalue().splitlines() if "\u2502" in line]
    assert len(lines) == len(report.rows(reports, {}))


def test_weights_that_differ_or_were_not_compared(reports: list[RunReport]) -> None:
    first, second, *rest = reports
    table = printed(reports, {first.run_id: True, second.run_id: False})
    assert table["final weights equal"] == ["yes", "no", "not compared", "not compared"]
    assert len(rest) == 2


def test_an_incomplete_run_is_never_equal(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    partial = analyse(run.write(lambda record: record["kind"] == "train_end", result=False))
    assert report.equality([partial], partial) == {"r": False}
    assert printed([partial], {})["complete"] == ["no, 20 steps"]
    assert report.choose_reference([partial]) is None


def test_the_versions_that_ran(reports: list[RunReport]) -> None:
    assert report.versions(reports) == "torch 2.13.0; nvidia-resiliency-ext 0.4.1"
    assert report.versions([]) == "not recorded"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (0.004, "4.0 ms"), (0.05, "50 ms"), (0.126, "0.13 s"), (12.34, "12.3 s"), (1234.5, "1234 s")],
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert report.seconds(value) == text
    assert report.seconds(None) == report.seconds(float("nan")) == "-"


class _Page(HTMLParser):
    """Notes what would be loaded, and that every element is closed."""

    VOID = {"meta", "br", "img", "link", "hr", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.loaded.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_all_plots(reports: list[RunReport], tmp_path: Path) -> None:
    path = tmp_path / "out" / "page.html"
    predicted = {reports[1].run_id: dict(reports[1].buckets)}
    equal = report.equality(reports, reports[0])
    write_html(path, reports, equal=equal, reference=reports[0], predicted=predicted, title="A <b> & c")
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.open == [] and page.loaded == []
    assert not re.search(r"url\((?!#)|@import|<script", text)
    # Legend, a timeline and a waterfall a run, phases, losses.
    assert page.tags.count("svg") == 1 + 4 + 1 + 4 + 1
    assert "A &lt;b&gt; &amp; c" in text and "predicted" in text and "exactly zero at every step" in text
    assert len(text) < 1_000_000
    assert [item.name for item in path.parent.iterdir()] == ["page.html"]


def test_every_bucket_and_phase_has_a_colour() -> None:
    assert set(plots.COLOURS) == set(BUCKETS)
    assert len(set(plots.COLOURS.values())) == len(BUCKETS)


def test_merging_keeps_the_whole_time() -> None:
    pieces = [Piece(0, 1, "useful"), Piece(1, 1.001, "other"), Piece(1.001, 2, "useful"), Piece(2, 3, "drain")]
    merged = plots.merge(pieces, 0.01)
    assert merged == [Piece(0, 2, "useful"), Piece(2, 3, "drain")]


def test_the_plot_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "r", num_ranks=2)
    run.begin()
    run.steps(1, 3000, data_s=0.001, gap_s=0.001)
    run.finish(3000)
    assert len(plots.to_svg(plots.timeline(analyse(run.write())))) < 100_000


def test_a_partial_run_can_be_drawn(tmp_path: Path) -> None:
    run = in_process_run(tmp_path / "r")
    cut = next(i for i, record in enumerate(run.records) if record.get("type") == "hang") + 1
    del run.records[cut:]
    partial = analyse(run.write(result=False))
    write_html(tmp_path / "page.html", [partial], equal={})
    text = (tmp_path / "page.html").read_text()
    assert "partial report" in text and "not recovered" in text and "no run without faults" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS["report"] == "payload.report:cli"
    folders = [str(folder(script, tmp_path)) for script in SCRIPTS]
    page, figures = tmp_path / "p.html", tmp_path / "out" / "figures.json"
    assert report.cli([*folders, "--html", str(page), "--json", str(figures)]) == 0
    assert page.exists()
    straight, faulty, *_ = json.loads(figures.read_text())
    assert straight["recoveries"] == [] and faulty["recoveries"][1]["type"] == "hang"
    assert sum(faulty["buckets_s"].values()) == pytest.approx(faulty["duration_s"], abs=1e-6)
    assert str(tmp_path) not in figures.read_text()
    out = capsys.readouterr().out
    assert "final weights equal" in out and "sum = T" in out
    assert report.cli([str(tmp_path / "nowhere")]) == 1
    assert "no event log" in capsys.readouterr().err


def test_predicted_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight, faulty, other = (folder(script, tmp_path) for script in (straight_run, in_process_run, in_job_run))
    page = tmp_path / "p.html"
    arguments = [str(faulty), str(other), "--calibrate", str(straight), str(faulty), "--html", str(page)]
    assert report.cli(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("predicted \u2503") == 1
    assert "in-job: no prediction: calibration: no recovery of the worker layer measured" in out.replace("\n", " ")
    assert page.read_text().count("predicted") == 1


def test_a_hang_that_was_not_calibrated_takes_the_profile_s_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunBuilder(tmp_path / "one")
    run.begin()
    run.steps(1, 5)
    run.save(5)
    run.fault("exception", 1, 6)
    run.leave_in_process(0.1)
    run.enter(5)
    run.steps(6, 8)
    run.finish(8)
    calibration, measured = str(run.write()), str(folder(in_process_run, tmp_path))
    assert report.cli([measured, "--calibrate", calibration]) == 0
    assert "detection of hang not measured" in " ".join(capsys.readouterr().out.split())
    assert report.cli([measured, "--calibrate", calibration, "--profile", "local"]) == 0
    assert "predicted" in capsys.readouterr().out
