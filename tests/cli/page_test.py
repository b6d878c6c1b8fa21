#!/usr/bin/env python3
"""page_test.py PROGRAM: the report's page shows unusual runs correctly: extreme values, ends and names."""
import html
import json
import os
import re
import subprocess
import sys

import chromium
from runs import check, finish, run_tests

program = sys.argv[1]
HEADER = {"format": "headroom-history", "version": 1, "headroom": "1", "group": "", "started": "2026-01-01T00:00:00Z",
          "settings": {}}

# A script that writes the state of the charts into the page as JSON: ticks, ticks that are cut off, paths, the tooltips
# of the first and last step, and the texts of some times.
PROBE = """<script>
{
const charts = [...document.querySelectorAll('.plot svg')].map(chart => ({
  ticks: [...chart.querySelectorAll('text')].map(text => text.textContent),
  marks: [...chart.querySelectorAll('text')].filter(text => text.getAttribute('y') < chart.clientHeight - 10)
                                            .map(text => text.textContent),
  cut: [...chart.querySelectorAll('text')].filter(text => {
    const box = text.getBBox();
    return box.x < 0 || box.x + box.width > chart.clientWidth;
  }).map(text => text.textContent),
  start: Number(chart.querySelector('.grid').getAttribute('x1')),
  paths: [...chart.querySelectorAll('path')].map(path => path.getAttribute('d')).join(''),
}));
// The Home and End keys reach the first and the last step.
const tips = [];
const plot = document.querySelector('.plot');
for (const key of ['Home', 'End']) {
  plot.dispatchEvent(new KeyboardEvent('keydown', {key}));
  tips.push(tip.textContent);
}
hideTip();
const times = [59.94, 59.97, 61.2, 119.7, 3599.6, 5400, 7199.9, null].map(time);
const seen = document.createElement('pre');
seen.id = 'seen';
seen.textContent = JSON.stringify({charts, tips, times, text: document.getElementById('main').innerText,
                                   head: document.getElementById('head').innerText});
document.body.append(seen);
}
</script>"""


def write_history(folder, steps, name="run", end=None):
    """Writes a history. Each step is a dict of the entries that differ from the default."""
    os.makedirs(folder)
    lines = [{**HEADER, "name": name}]
    for number, step in enumerate(steps, 1):
        lines.append({"step": number, "loss": 1.0, "scale": 8.0, "overflow": False, "grad_norm": 0.5,
                      "seconds": 0.1 * number, **step})
    if end is not None:
        lines.append({"end": end, "steps": len(steps), "skipped": 0, "seconds": 1, "results": {}})
    with open(f"{folder}/history.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def show(folder):
    """What the report of the runs in a folder shows, as collected by PROBE."""
    path = f"{folder}/report.html"
    result = subprocess.run([program, "report", folder], capture_output=True, text=True)
    check(result.returncode == 0, result.stderr)
    with open(path) as file:
        page = file.read()
    with open(path, "w") as file:
        file.write(page.replace("</body>", PROBE + "</body>"))
    seen = re.search('<pre id="seen">(.*?)</pre>', chromium.render(path), re.S)
    check(seen, f"{folder} is shown")
    return json.loads(html.unescape(seen.group(1))) if seen else None


def show_run(temp, name, steps):
    """As show(), for a run with these steps. Checks that every chart is complete."""
    write_history(f"{temp}/{name}", steps)
    seen = show(f"{temp}/{name}")
    for chart in seen["charts"] if seen else []:
        check(not chart["cut"], f"{name}: {chart['cut']} are cut off")
        check(chart["marks"] and chart["paths"], f"{name}: {chart}")
        check("NaN" not in chart["paths"] and "Infinity" not in chart["paths"], f"{name}: {chart['paths']}")
        check(all(text and "N" not in text and "I" not in text for text in chart["ticks"]), chart["ticks"])
        check(len(set(chart["marks"])) == len(chart["marks"]), f"{name}: {chart['marks']}")
    return seen


def losses(*values):
    return [{"loss": value} for value in values]


def test_ticks_are_complete_and_charts_are_aligned(temp):
    for name, values, tick in (("negative", (-125000.0, -124000.0, -123456.0), "-125000"),
                               ("small", (-5e-5, 1e-5, 5e-5), "5e-5"),
                               ("large", (-4e7, 1.0, 2e7), "-4e7"),
                               ("close", (-125000.0, -124999.0), "-124999.5")):
        seen = show_run(temp, name, losses(*values))
        check(tick in seen["charts"][0]["marks"], (name, seen["charts"][0]))
        check(len({chart["start"] for chart in seen["charts"]}) == 1, [chart["start"] for chart in seen["charts"]])
        check(seen["tips"][0].startswith("Step 1") and seen["tips"][1].startswith(f"Step {len(values)}"), seen["tips"])


def test_logarithmic_axis_has_three_to_eight_ticks(temp):
    for decades in (2, 6, 9, 13):
        marks = show_run(temp, f"decades{decades}", losses(10.0 ** -decades, 1.0))["charts"][0]["marks"]
        check(3 <= len(marks) <= 8, (decades, marks))


def test_constant_and_extreme_values_are_drawn(temp):
    check(show_run(temp, "constant", losses(2.5, 2.5))["charts"][0]["marks"] == ["2.5"], "a constant")
    check(show_run(temp, "single", losses(0.125))["charts"][0]["marks"] == ["0.125"], "a single step")
    check(show_run(temp, "zeros", losses(0.0, 0.0))["charts"][0]["marks"] == ["0"], "zeros")
    for name, values in (("all", (1.7e308, -1.7e308, 5e-324)), ("tiny", (0.0, 5e-324)), ("tiniest", (5e-324,)),
                         ("positive", (1.7e308, 5e-324)), ("huge", (1.7e308, 1.6e308)), ("hugest", (1.7976e308,)),
                         ("same", (-1.7e308, -1.7e308))):
        show_run(temp, name, [{"loss": value, "grad_norm": abs(value)} for value in values])


def test_step_numbers_beyond_2_to_the_53_are_drawn(temp):
    # A browser holds whole numbers exactly up to 2^53 only.
    for name, first in (("far", 2 ** 53), ("farther", 2 ** 60), ("farthest", 2 ** 63 - 40)):
        seen = show_run(temp, name, [{"step": first + i} for i in range(30)])
        check("30 steps" in seen["head"], seen["head"])
        show_run(temp, name + "-one", [{"step": first}])


def test_times_are_rounded_and_may_be_infinite(temp):
    seen = show_run(temp, "endless", [{"seconds": 1.0}, {"seconds": "inf"}])
    check("unknown" in seen["text"], seen["text"])
    check(seen["times"] == ["59.9 s", "1 min 0 s", "1 min 1 s", "2 min 0 s", "1 h 0 min", "1 h 30 min", "2 h 0 min",
                            "unknown"], seen["times"])


def test_report_shows_how_each_run_ended(temp):
    ends = {"a": "finished", "b": "stopped: the loss is nan", "c": "stopped by hand", "d": None}
    for name, end in ends.items():
        write_history(f"{temp}/runs/{name}", losses(1.0, 2.0), name, end)
    text = show(f"{temp}/runs")["text"]
    for words in ("run\tended\t", "a\tfinished\t", "b\tstopped\t", "c\tstopped by hand\t", "d\tno end recorded\t"):
        check(words in text, (words, text))
    # The selected run shows the whole reason.
    write_history(f"{temp}/pair/a", losses(1.0), "a", "stopped: the loss is nan")
    write_history(f"{temp}/pair/b", losses(1.0), "b", "finished")
    check("stopped: the loss is nan" in show(f"{temp}/pair")["text"], "the reason of the selected run")


def test_control_characters_in_names_are_replaced(temp):
    turned = "\u202eevil\u2066\u200f\u009b"
    os.makedirs(f"{temp}/turned")
    step = {"step": 1, "loss": 1.0, "scale": 8.0, "overflow": True, "grad_norm": 0.5, "seconds": 1.0,
            "culprit": turned, "overflow_at": 8.0}
    with open(f"{temp}/turned/history.jsonl", "w") as file:
        for line in ({**HEADER, "name": turned, "settings": {turned: turned}}, step,
                     {"step": 1, "note": turned}):
            file.write(json.dumps(line) + "\n")
    seen = show(f"{temp}/turned")
    text = seen["head"] + seen["text"]
    check("\ufffdevil\ufffd\ufffd\ufffd" in text, text)
    check(not set(turned) - set("evil") & set(text), text)


if chromium.CHROMIUM is None:
    print("skipped: chromium is not installed")
    finish()
run_tests(globals())
