"""Histories for the tests of the report's page, and what a browser shows of them."""
import atexit
import json
import os
import subprocess
import sys

import chromium
from runs import check, finish

program = sys.argv[1]
if chromium.missing():
    finish()
browser = chromium.Browser()  # one for all tests
atexit.register(browser.close)

HEADER = {"format": "headroom-history", "version": 1, "headroom": "1", "group": "", "started": "2026-01-01T00:00:00Z",
          "settings": {}}

# The state of the charts: ticks, ticks that are cut off, paths, the tooltips of the first and last step, and the
# texts of some times.
PROBE = """(() => {
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
  curves: chart.querySelectorAll('.curve').length,
  skips: chart.querySelector('.skip').getAttribute('d').split('M').length - 1,
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
return {charts, tips, times, text: document.getElementById('main').innerText,
        head: document.getElementById('head').innerText};
})()"""

# Moves the cursor over every pixel of a plot and returns the tooltips' lines.
SWEEP = """(id => {
  const plot = document.getElementById('plot-' + id), box = plot.getBoundingClientRect(), seen = [];
  for (let x = 0; x < box.width; x++) {
    plot.dispatchEvent(new PointerEvent('pointermove',
        {clientX: box.left + x, clientY: box.top + 40, pointerType: 'mouse'}));
    seen.push([tip.querySelector('b').textContent, ...[...tip.querySelectorAll('div')].map(line => line.textContent)]);
  }
  hideTip();
  return seen;
})"""


def step_line(number, **more):
    return {"step": number, "loss": 1.0, "scale": 8.0, "overflow": False, "grad_norm": 0.5, "seconds": 0.1 * number,
            **more}


def skipped(**more):
    return {"overflow": True, "culprit": "w: 1 inf, 0 nan", **more}


def write_history(folder, steps, name="run", end=None, settings=None, layers=(), results=None):
    """Writes a history. Each step is a dict of the entries that differ from the default."""
    os.makedirs(folder)
    lines = [{**HEADER, "name": name, "settings": settings or {}}, *layers]
    lines += [step_line(number, **step) for number, step in enumerate(steps, 1)]
    if end is not None:
        lines.append({"end": end, "steps": len(steps), "skipped": 0, "seconds": 1, "results": results or {}})
    with open(f"{folder}/history.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def layer_line(name, largest, histogram, start, step=1):
    """A snapshot of one layer."""
    layer = {"name": name, "count": sum(histogram), "zeros": 0, "subnormals": 0, "inf": 0, "nan": 0, "amax": largest,
             "from": start, "histogram": histogram}
    return {"step": step, "scale": 8.0, "layers": [layer]}


def open_report(folder, **options):
    """Writes the report of the runs in a folder and opens it."""
    result = subprocess.run([program, "report", folder], capture_output=True, text=True)
    check(result.returncode == 0, result.stderr)
    browser.open(f"{folder}/report.html", **options)


def check_no_problems():
    problems = browser.problems()
    check(not problems, problems)


def show(folder, **options):
    """What the report of the runs in a folder shows, as collected by PROBE."""
    open_report(folder, **options)
    seen = browser.run(PROBE)
    check_no_problems()
    return seen


def show_run(temp, name, steps):
    """As show(), for a run with these steps. Checks that every chart is complete."""
    write_history(f"{temp}/{name}", steps)
    seen = show(f"{temp}/{name}")
    for chart in seen["charts"]:
        check(not chart["cut"], f"{name}: {chart['cut']} are cut off")
        check(chart["marks"] and chart["paths"], f"{name}: {chart}")
        check("NaN" not in chart["paths"] and "Infinity" not in chart["paths"], f"{name}: {chart['paths'][:400]}")
        check(all(text and "N" not in text and "I" not in text for text in chart["ticks"]), chart["ticks"])
        check(len(set(chart["marks"])) == len(chart["marks"]), f"{name}: {chart['marks']}")
    return seen


def losses(*values):
    return [{"loss": value} for value in values]


def click(element):
    """Clicks the element with this id with the mouse."""
    x, y = browser.run(f"(() => {{ const e = document.getElementById('{element}'); e.scrollIntoView({{block: 'center'}});"
                       "const box = e.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()")
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=1)


def steps_of(tooltips):
    return [int(lines[0].removeprefix("Step ").replace(",", "")) for lines in tooltips]


def check_sweep(tooltips, skips, every_skip):
    """Every tooltip of a skipped step says so, no other does, and, if asked, every skipped step was shown."""
    wrong = [lines for lines, step in zip(tooltips, steps_of(tooltips))
             if (step in skips) != any("skipped at scale" in line for line in lines)]
    check(not wrong, wrong[:3])
    if every_skip:
        check(skips <= set(steps_of(tooltips)), skips - set(steps_of(tooltips)))
