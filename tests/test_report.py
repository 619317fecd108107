"""`sgt-ds report`: what the page says is what the run's files say, and nothing in them can break it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from report_pages import LOOPS, figures, numbers, of_class, report, text_of, write_run

from sgt_ds.cli import main
from sgt_ds.report import read_history
from sgt_ds.report.html.scale import axis
from sgt_ds.report.html.story import loops_now


def test_loops_are_drawn_elsewhere_than_the_journal_has_them(tmp_path: Path) -> None:
    document = report(tmp_path, write_run(tmp_path / "run"))
    [timeline] = figures(document, "Loop depth")
    area = of_class(timeline, "area")[0]
    bars = [rect for rect in of_class(area, "depth") if rect.get("x")]
    tags = [text_of(tag) for tag in of_class(area, "in-bar")]
    assert len(bars) == len(tags) == len(LOOPS)
    row = 1000 / 7  # six layers, and the decisions below
    drawn = set()
    for bar, text in zip(bars, tags, strict=True):
        left, width, top = (float(bar.get(key, "nan")) for key in ("x", "width", "y"))
        layer = 6 - math.ceil((top + 0.5 * float(bar.get("height", "nan"))) / row)
        bounds = (round(left * 0.12), round((left + width) * 0.12))
        drawn.add((layer, *bounds, int(text.removeprefix("×"))))
    assert drawn == LOOPS

    for title in ("Entropy by layer over time", "Differences between heads over time"):
        [heat] = figures(document, title)
        frames = set()
        for path in of_class(of_class(heat, "area")[0], "outline"):
            corners = re.fullmatch(r"M(\S+) (\S+)H(\S+)V\S+H\S+z", path.get("d", ""))
            assert corners
            left, top, right = map(float, corners.groups())
            frames.add((5 - round(top * 6 / 1000), round(left * 0.12), round(right * 0.12)))
        assert frames == {span[:3] for span in LOOPS}

    [heads] = figures(document, "Current heads")
    cells = {
        (5 - round(float(top) * 6 / 1000), round(float(left) / 250))
        for path in of_class(of_class(heads, "area")[0], "outline")
        for left, top in re.findall(r"^M(\S+?) (\S+?)H", path.get("d", ""))
    }
    assert cells == {(4, 1), (4, 3), (2, 1), (2, 3)}
    # The colour of a cell is the value's: yellow is the highest, dark blue the lowest.
    shades = {p.get("fill"): p.get("d", "") for p in of_class(heads, "cell")}
    assert shades["#fde725"].count("M") == 4
    assert shades["#440154"].count("M") == 8


def test_the_story_tells_other_loops_than_the_journal(tmp_path: Path) -> None:
    document = report(tmp_path, write_run(tmp_path / "run"))
    story = [text_of(item) for item in of_class(document, "story")[0]]
    assert story[0] == "Steps 0 to 40: every layer runs once."
    assert story[1].startswith("Step 40: layer 4 loops ×1 (heads 1, 3; 0, 2 fading out).")
    assert "Why: deepest candidate." in story[1]
    assert story[2].startswith("Step 60: layer 4 loops ×2 (heads 1, 3).")
    assert story[-1].endswith("layer 4 loops ×2 (heads 1, 3); no further change is possible.")
    run = read_history(tmp_path / "run")
    entering = replace(run, decisions=run.decisions[:1])  # as if it had never deepened
    assert loops_now(entering) == "layer 4 loops ×1 (heads 1, 3)"


def test_every_plot_has_axes_a_legend_where_it_needs_one_and_its_numbers(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "vanilla"), write_run(tmp_path / "b", worse=0.25)]
    document = report(tmp_path, *runs)
    plots = list(document.iter("figure"))
    assert len(plots) == 20
    for plot in plots:
        for part in ("y-label", "x-label"):
            assert text_of(of_class(plot, part)[0]).strip(), text_of(plot)
        assert len(of_class(of_class(plot, "x-ticks")[0], "tick")) >= 2
        assert len(of_class(of_class(plot, "y-ticks")[0], "tick")) >= 2
        assert numbers(plot), text_of(plot)
        assert of_class(plot, "legend") or not of_class(plot, "depth")
    [loss] = figures(document, "Loss by cumulative FLOPs")
    legend = [text_of(entry) for entry in of_class(loss, "legend")[0]]
    assert legend == ["a, training", "a, validation", "b, training", "b, validation"]
    # One colour means the same entropy in both.
    left, right = figures(document, "Entropy by layer over time")
    assert text_of(of_class(left, "scale")[0]) == text_of(of_class(right, "scale")[0])


def test_a_comparison_subtracts_other_losses_than_those_at_the_same_point(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "vanilla"), write_run(tmp_path / "b", worse=0.25)]
    document = report(tmp_path, *runs)
    [steps] = figures(document, "Validation loss against a, at the same step")
    assert numbers(steps) == [["b", str(step), "0.25"] for step in (40, 80, 120)]
    [compute] = figures(document, "Validation loss against a, at the same cumulative FLOPs")
    flops = {
        row["step"]: row["flops"]
        for row in map(json.loads, (tmp_path / "b" / "metrics.jsonl").read_text().splitlines())
        if "flops" in row
    }
    vanilla = flops[40] / 40  # nothing loops until then
    # The baseline's loss falls on a straight line: 3 - step / 100, step = FLOPs / vanilla.
    expected = 3.25 - 80 / 100 - (3 - flops[80] / vanilla / 100)
    assert float(numbers(compute)[1][2]) == pytest.approx(expected, rel=1e-3)
    assert numbers(compute)[2][2] == "–"  # the baseline never spent that much


def test_restarts_environment_and_plan_are_told_wrong(tmp_path: Path) -> None:
    document = report(tmp_path, write_run(tmp_path / "run"))
    rows = [[text_of(cell) for cell in row] for row in document.iter("tr")]
    assert ["2025-06-15 15:06:40 UTC", "0", "–", "2", "node-1"] in rows
    assert ["2025-10-09 08:53:20 UTC", "60", "27", "4", "node-2"] in rows
    assert ["device of rank 0", "NVIDIA H200"] in rows
    assert ["torch", "2.13.0"] in rows
    assert ["restarts", "1"] in rows
    assert ["time left at that speed", "40s"] in rows  # 80 updates of 512 tokens at 1,024 a second
    named = {row[0]: row for row in rows if row}
    # The trainer's count and the plan's, made by two programs from the same entropies.
    assert named["planned, with this run's growth"][1:3] == named["measured"][1:3]
    [loss] = figures(document, "Loss by step")
    [moment] = of_class(of_class(loss, "area")[0], "moment")
    assert moment.get("d") == "M500 0V1000"  # step 60 of 120


def test_scores_of_the_loop_are_missing_or_swapped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "vanilla")
    with (run / "metrics.jsonl").open("a") as stream:
        for step, value in ((120, 0.25), (121, 0.5)):
            scores = {
                "arc": {"acc": value, "acc_stderr": 0.1},
                "wiki": {"bits_per_byte": 2 - value},
            }
            stream.write(json.dumps({"step": step, "evaluation": scores}) + "\n")
    document = report(tmp_path, run)
    [arc], [wiki] = figures(document, "arc, in the loop"), figures(document, "wiki, in the loop")
    assert numbers(arc) == [["run", "120", "0.25"], ["run", "121", "0.5"]]
    assert [row[2] for row in numbers(wiki)] == ["1.75", "1.5"]


HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script><!--'


def test_text_from_files_becomes_an_element(tmp_path: Path) -> None:
    run = write_run(tmp_path / 'run"><script>x<')
    journal = run / "growth.jsonl"
    text = journal.read_text().replace(
        '"reason":"deepest', f'"reason":"{json.dumps(HOSTILE)[1:-1]}'
    )
    journal.write_text(text)
    rows = (run / "metrics.jsonl").read_text().replace('"fixed"', json.dumps(HOSTILE))
    (run / "metrics.jsonl").write_text(rows)
    starts = (
        (run / "logs" / "starts.jsonl").read_text().replace("node-2", "</table></style><b>&amp;")
    )
    (run / "logs" / "starts.jsonl").write_text(starts)
    secret = "x: s3://key:secret@bucket/a?token=abc</pre><script>"
    (run / "run.yaml").write_text(secret)
    document = report(tmp_path, run)
    names = {element.tag for element in document.iter()}
    assert not names & {"script", "img", "b", "iframe", "link", "object"}
    page = text_of(document)
    for told in (HOSTILE, "</table></style><b>&amp;", run.name, "s3://…@bucket/a?…"):
        assert told in page
    assert "secret" not in page
    assert "token" not in page.partition("s3://")[2][:60]


def test_the_page_fetches_something(tmp_path: Path) -> None:
    document = report(tmp_path, write_run(tmp_path / "run"))
    for element in document.iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object", "embed")
        for name, value in element.items():
            assert not name.startswith("on")
            if name in ("src", "href", "{http://www.w3.org/1999/xlink}href"):
                assert value.startswith("#")
    sheet = text_of(document.find("head/style"))
    assert "url(" not in sheet
    assert "@import" not in sheet
    policy = document.find("head/meta[@http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert "default-src 'none'" in policy.get("content", "")


def test_a_run_that_lives_or_was_cut_off_gives_no_report(tmp_path: Path) -> None:
    torn = write_run(tmp_path / "torn", until=75)
    for name in ("metrics.jsonl", "growth.jsonl", "logs/starts.jsonl"):
        with (torn / name).open("a") as stream:
            stream.write('{"step": 76, "lo')
    text = text_of(report(tmp_path, torn))
    assert "step 75 of 200" in text

    begun = write_run(tmp_path / "begun")
    for path in (begun / "metrics.jsonl", begun / "logs" / "starts.jsonl", begun / "run.yaml"):
        path.unlink()
    header = (begun / "growth.jsonl").read_text().splitlines()[0]
    (begun / "growth.jsonl").write_text(header + "\n")
    text = text_of(report(tmp_path, begun))
    assert "No update was logged yet." in text
    assert "no record of its starts" in text

    rows_only = write_run(tmp_path / "rows-only")
    (rows_only / "growth.jsonl").unlink()
    assert "unknown" in text_of(report(tmp_path, rows_only))

    packed = write_run(tmp_path / "packed")
    journal = packed / "growth.jsonl"
    journal.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(journal.read_bytes()))
    journal.unlink()
    assert len(figures(report(tmp_path, packed, torn), "Loop depth")) == 2


def test_losses_that_are_not_finite_break_the_lines_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "vanilla")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] in (20, 30) and "loss" in row:
            row |= {"loss": None, "grad_norm": 10**400, "tokens_per_second": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = report(tmp_path, run)
    [loss] = figures(document, "Loss by step")
    path = of_class(of_class(loss, "area")[0], "thin")[0].get("d", "")
    assert "nan" not in path
    assert path.count("M") == 2
    assert ["training", "20", "–"] in numbers(loss)


def set_line(path: Path, number: int, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "line", "remedy"),
    [
        ("metrics.jsonl", '{"step": 10, "loss"', "metrics.jsonl: line 1: is not a JSON object"),
        ("metrics.jsonl", '{"step": 10, "loss": "x"}', "loss is 'x', not a number"),
        ("growth.jsonl", "{}", "growth.jsonl: "),
        ("growth.jsonl", "\x00\x01", "growth.jsonl: line 1"),
        ("logs/starts.jsonl", '{"step": -1}', "step is '-1', not a count"),
    ],
)
def test_a_broken_file_is_more_than_one_line_or_leaves_a_report(
    name: str, line: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    set_line(run / name, 1, line)
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert remedy in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_wrong_arguments_are_more_than_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", until=10)
    for arguments, remedy in (
        ([str(tmp_path / "none"), "-o", str(tmp_path / "r")], "is not a run directory"),
        (
            [str(tmp_path), "-o", str(tmp_path / "r")],
            "holds neither metrics.jsonl nor growth.jsonl",
        ),
        ([str(run), "-o", str(tmp_path / "no" / "r")], "cannot be written"),
        ([*[str(run)] * 9, "-o", str(tmp_path / "r")], "sgt-ds: command line: RUN: 9 runs are"),
        ([str(run), str(run), "-o", str(tmp_path / "r")], "is given twice"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert remedy in error
        assert error.count("\n") == 1


def test_two_runs_go_by_one_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / seed / "sgt", until=10) for seed in ("seed-1", "seed-2")]
    document = report(tmp_path, *runs)
    assert text_of(document.find("body/header/h1")) == "seed-1/sgt · seed-2/sgt"


def test_a_long_run_takes_long_or_makes_a_page_that_no_one_can_open(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "vanilla")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    with (run / "metrics.jsonl").open("w") as stream:
        for step in range(1, 30_001):
            stream.write(json.dumps({**row, "step": step, "tokens": step, "flops": step}) + "\n")
    out, link = tmp_path / "report.html", tmp_path / "link"
    link.symlink_to(out)
    assert main(["report", str(run), "-o", str(link)]) == 0
    assert out.stat().st_size < 1_000_000
    assert "the band around a line is their range" in out.read_text()


HARNESS = """<!doctype html><iframe src="report.html" width="{width}" height="4000"></iframe><pre id="out"></pre>
<script>
onload = () => {{
  const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
  const faults = [], box = element => element.getBoundingClientRect();
  if (root.scrollWidth > {width}) faults.push("page is " + root.scrollWidth + " wide");
  for (const part of inner.querySelectorAll(".chart, .legend > *, .y-label, .x-label, h1, li"))
    if (box(part).right > {width} + 1) faults.push("sticks out: " + part.textContent.slice(0, 60));
  for (const ticks of inner.querySelectorAll(".x-ticks")) {{
    const boxes = [...ticks.children].map(box).sort((a, b) => a.left - b.left);
    for (let i = 1; i < boxes.length; i++)
      if (boxes[i].left < boxes[i - 1].right) faults.push("ticks touch: " + ticks.textContent);
  }}
  for (const text of inner.querySelectorAll(".tick, .x-label, .y-label, .legend, td, th"))
    if (parseFloat(getComputedStyle(text).fontSize) < 10) faults.push("small: " + text.textContent);
  for (const area of inner.querySelectorAll(".area"))
    if (box(area).width < 150 || box(area).height < 150) faults.push("an area is hardly there");
  document.querySelector("#out").textContent = "faults: " + JSON.stringify(faults);
}};
</script>"""


@pytest.mark.network
@pytest.mark.parametrize("width", [390, 1280])
def test_something_overflows_or_overlaps_in_a_browser(width: int, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing; to look at pages: apt-get install chromium")
    runs = [
        write_run(tmp_path / "vanilla", "vanilla"),
        write_run(tmp_path / "a-run-with-a-long-name"),
    ]
    report(tmp_path, *runs)
    (tmp_path / "harness.html").write_text(HARNESS.format(width=width))
    began = time.monotonic()
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--window-size={width + 100},900", f"file://{tmp_path / 'harness.html'}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"faults: (\[.*?\])</pre>", done.stdout)
    assert found, (time.monotonic() - began, done.stderr[-2000:])
    assert found[1] == "[]"


@pytest.mark.parametrize(
    ("values", "label", "texts"),
    [
        ([0, 2], "x", ["0", "1", "2"]),
        ([0, 10], "x", ["0", "2", "4", "6", "8", "10"]),
        ([0, 14], "x", ["0", "2", "4", "6", "8", "10", "12", "14"]),
        ([0, 14.5], "x", ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
        ([0, 3e-3], "x (×10⁻³)", ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        ([0, 0.06], "x", ["0.00", "0.01", "0.02", "0.03", "0.04", "0.05", "0.06"]),
        ([0, 5e6], "x (×10⁶)", ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_an_axis_says_other_values_than_its_ticks_or_parts_of_a_step(
    values: list[float], label: str, texts: list[str]
) -> None:
    drawn = axis("x", values, scaled=True)
    assert (drawn.label, [text for _, text in drawn.ticks()]) == (label, texts)
    for place, text in drawn.ticks():
        assert place == pytest.approx(float(text) * drawn.divisor / values[1])
