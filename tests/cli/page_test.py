#!/usr/bin/env python3
"""page_test.py PROGRAM: the report's page in a browser: unusual runs, tooltips, zoom, legend, tables, files."""
import json
import os
import re
import struct
import subprocess
import sys
import time

import chromium
from runs import check, finish, run_tests

program = sys.argv[1]
HEADER = {"format": "headroom-history", "version": 1, "headroom": "1", "group": "", "started": "2026-01-01T00:00:00Z",
          "settings": {}}
browser = None  # one for all tests

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


# ---- unusual runs


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


def test_scale_axis_has_powers_of_two_only(temp):
    for name, scales in (("few", (256.0, 512.0, 1024.0)), ("many", (1.0, 65536.0)), ("small", (0.25, 8.0)),
                         ("same", (4096.0, 4096.0))):
        marks = show_run(temp, name, [{"scale": scale} for scale in scales])["charts"][1]["marks"]
        check(len(marks) >= 2 and all(re.fullmatch("2[⁻⁰¹²³⁴-⁹]+", mark) for mark in marks), (name, marks))


def test_constant_and_extreme_values_are_drawn(temp):
    check(show_run(temp, "constant", losses(2.5, 2.5))["charts"][0]["marks"] == ["2.5"], "a constant")
    check(show_run(temp, "single", losses(0.125))["charts"][0]["marks"] == ["0.125"], "a single step")
    check(show_run(temp, "zeros", losses(0.0, 0.0))["charts"][0]["marks"] == ["0"], "zeros")
    for name, values in (("all", (1.7e308, -1.7e308, 5e-324)), ("tiny", (0.0, 5e-324)), ("tiniest", (5e-324,)),
                         ("positive", (1.7e308, 5e-324)), ("huge", (1.7e308, 1.6e308)), ("hugest", (1.7976e308,)),
                         ("same", (-1.7e308, -1.7e308))):
        show_run(temp, name, [{"loss": value, "grad_norm": abs(value)} for value in values])
        for choice in ("smooth-10", "axis-loss-log", "axis-loss-linear", "axis-norm-linear"):
            click(choice)
            paths = browser.run("[...document.querySelectorAll('.curve')].map(path => path.getAttribute('d')).join('')")
            check("NaN" not in paths and "Infinity" not in paths, (name, choice, paths[:300]))
        check_no_problems()


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
    with open(f"{temp}/turned/history.jsonl", "w") as file:
        for line in ({**HEADER, "name": turned, "settings": {turned: turned}},
                     step_line(1, **skipped(culprit=turned, overflow_at=8.0)), {"step": 1, "note": turned}):
            file.write(json.dumps(line) + "\n")
    seen = show(f"{temp}/turned")
    text = seen["head"] + seen["text"]
    check("\ufffdevil\ufffd\ufffd\ufffd" in text, text)
    check(not set(turned) - set("evil") & set(text), text)


# ---- tooltips


def check_sweep(tooltips, skips, every_skip):
    """Every tooltip of a skipped step says so, no other does, and, if asked, every skipped step was shown."""
    wrong = [lines for lines, step in zip(tooltips, steps_of(tooltips))
             if (step in skips) != any("skipped at scale" in line for line in lines)]
    check(not wrong, wrong[:3])
    if every_skip:
        check(skips <= set(steps_of(tooltips)), skips - set(steps_of(tooltips)))


def test_skipped_step_says_so_whenever_it_is_the_step_shown(temp):
    cases = {"few": (12, {3, 7, 12}), "some": (400, {1, 37, 38, 200, 399}), "rows": (1000, set(range(300, 420))),
             "long": (30000, set(range(11, 30000, 700))), "most": (30000, set(range(1, 30001)) - set(range(5, 30001, 9)))}
    for name, (steps, skips) in cases.items():
        write_history(f"{temp}/{name}", [skipped() if i in skips else {} for i in range(1, steps + 1)])
        for width in (1400, 390):
            open_report(f"{temp}/{name}", width=width)
            for chart in ("loss", "scale", "norm"):
                check_sweep(browser.run(f"{SWEEP}('{chart}')"), skips, len(skips) < 30 and width == 1400)
            browser.run("view.zoom = [2, 40]; render()")
            check_sweep(browser.run(f"{SWEEP}('loss')"), skips, False)
        check_no_problems()


def test_mouse_and_arrow_keys_show_the_skipped_step(temp):
    write_history(f"{temp}/run", [skipped() if i == 6 else {} for i in range(1, 11)])
    open_report(f"{temp}/run")
    x, y, width, start = browser.run("(() => { const plot = document.getElementById('plot-loss');"
                                     "const box = plot.getBoundingClientRect(); return [box.x, box.y, box.width,"
                                     "Number(plot.querySelector('.grid').getAttribute('x1'))]; })()")
    browser.run("window.seen = []; document.getElementById('plot-loss').addEventListener('pointermove', () =>"
                "seen.push([...tip.children].map(line => line.textContent)))")
    for at in range(int(start), int(width)):
        browser.mouse("mouseMoved", x + at, y + 40)
    seen = browser.run("seen")
    check(len(seen) > 500, len(seen))
    check_sweep(seen, {6}, True)
    # A step is a ninth of the plot wide, far more than the pixels around its mark.
    check(steps_of(seen).count(6) > 50, steps_of(seen).count(6))
    browser.run("document.getElementById('plot-loss').focus()")
    texts = []
    for key in ("Home", *["ArrowRight"] * 5, "End"):
        browser.key(key)
        texts.append(browser.run("tip.textContent"))
    check("skipped" in texts[5] and not any("skipped" in text for i, text in enumerate(texts) if i != 5), texts)
    check(texts[-1].startswith("Step 10"), texts)


def test_compared_runs_are_shown_at_the_same_step(temp):
    def value(run, step):
        return 1.0 + (step * (run + 3)) % 101 / 100

    lengths = {"a": 9000, "b": 12000, "c": 3001, "d": 40000}
    for run, (name, steps) in enumerate(lengths.items()):
        write_history(f"{temp}/{name}", [{"loss": value(run, i)} for i in range(1, steps + 1)], name)
    open_report(temp)
    for zoom in ("null", "[2000, 4000]"):
        browser.run(f"view.zoom = {zoom}; render()")
        tooltips = browser.run(f"{SWEEP}('loss')")
        check(len(set(steps_of(tooltips))) > 50, len(set(steps_of(tooltips))))
        for lines, step in zip(tooltips, steps_of(tooltips)):
            for run, (name, last) in enumerate(lengths.items()):
                want = f"{name}: loss {value(run, step):.5g}" if step <= last else f"ended at step {last:,}"
                found = any(want in line for line in lines)
                check(found, (want, lines)) if not found else None
    check_no_problems()


# ---- precision, bounds


def test_runs_are_judged_by_their_own_precision(temp):
    # Values of 2^-40 are lost in FP16 and normal in BF16 and FP32.
    for precision, lost in (("fp16", True), ("bf16", False), ("fp32", False)):
        write_history(f"{temp}/{precision}", losses(1.0), settings={"precision": precision},
                      layers=[layer_line("w", 2.0 ** -40, [100], -40)])
        text = show(f"{temp}/{precision}")["text"]
        check(f"lost in {precision.upper()}" in text and f"The bands are those of {precision.upper()}" in text, text)
        check(("100.0 %" in text) == lost and (f"{precision.upper()} loses 100" in text) == lost, text)


def test_one_doubling_is_singular(temp):
    for name, largest, words in (("one", 20000.0, "after 1 more doubling of"), ("two", 16000.0, "2 more doublings of"),
                                 ("none", 40000.0, "0 more doublings of")):
        write_history(f"{temp}/{name}", losses(1.0), layers=[layer_line("w", largest, [1], 14)])
        text = show(f"{temp}/{name}")["text"]
        check(words in text, (words, text))


# ---- controls


def curve_points(chart="loss"):
    return browser.run(f"document.querySelector('#plot-{chart} .curve').getAttribute('d').split('L').length")


def test_dragging_zooms_and_shows_every_step(temp):
    steps = 15000
    write_history(f"{temp}/run", [{"loss": 2.0 + i * 7 % 13} for i in range(steps)])
    open_report(f"{temp}/run")
    x, y, width = browser.run("(() => { const box = document.getElementById('plot-loss').getBoundingClientRect();"
                              "return [box.x, box.y, box.width]; })()")
    whole = curve_points()
    check(whole < 5 * width, whole)  # no more detail than pixels
    browser.drag(x + 400, y + 60, x + 420)
    first, last = browser.run("view.zoom")
    check(1 < first < last < steps and last - first < 500, (first, last))
    check(curve_points() >= last - first, (curve_points(), first, last))
    shown = browser.run("document.getElementById('controls').textContent")
    check(f"Steps {first:,} to {last:,}" in shown, shown)
    axis = browser.run("[...document.querySelectorAll('#plot-scale text')].map(text => text.textContent)")
    check(f"{first:,}"[:2] == axis[-1][:2], (first, axis))  # all charts show the same steps
    click("zoom-out")
    wider = browser.run("view.zoom")
    check(wider[1] - wider[0] > last - first, wider)
    click("zoom-all")
    check(browser.run("view.zoom") is None and curve_points() == whole, "all steps")
    # By keyboard: around the cursor, and back.
    browser.run("document.getElementById('plot-loss').focus()")
    browser.key("+", "+")
    browser.key("+", "+")
    first, last = browser.run("view.zoom")
    check(steps / 5 < last - first < steps / 3, (first, last))
    check(browser.run("document.activeElement.id") == "plot-loss", "the chart keeps the focus")
    browser.key("Escape")
    check(browser.run("view.zoom") is None, "Escape")
    check_no_problems()


def test_smoothing_averages_around_each_step(temp):
    write_history(f"{temp}/run", [{"loss": 5.0 + (1.0 if i % 2 else -1.0)} for i in range(600)])
    open_report(f"{temp}/run")
    click("smooth-100")
    count, values = browser.run("[document.querySelectorAll('#plot-loss .curve').length,"
                                "smoothed(data.runs[0].loss[0], data.runs[0].loss[1], 100)]")
    check(count == 2, "the values stay visible behind the average")
    check(all(abs(value - 5.0) < 0.02 for value in values), values[:3])
    line = browser.run("smoothed([...Array(1000).keys()], [...Array(1000).keys()], 20)")
    check(all(abs(value - i) < 0.5 for i, value in enumerate(line[200:800], 200)), "a line is not shifted")
    gaps = browser.run("smoothed([1, 2, 3], [1, null, 3], 10)")
    check(gaps[1] is None and 1 < gaps[0] < gaps[2] < 3, gaps)
    browser.key("Home")
    check(browser.run("document.activeElement.id") == "smooth-100", "the button keeps the focus")


def test_axis_can_be_logarithmic_or_linear(temp):
    seen = show_run(temp, "run", losses(1.0, 2.0, 20.0))
    check({"0", "5"} <= set(seen["charts"][0]["marks"]), seen["charts"][0]["marks"])
    click("axis-loss-log")
    check({"1", "10"} <= set(browser.run(PROBE)["charts"][0]["marks"]), "log")
    click("axis-scale-linear")
    check(browser.run(PROBE)["charts"][1]["marks"] == ["8"], "linear")


def test_legend_switches_runs_on_and_off(temp):
    for name in ("a", "b", "c"):
        write_history(f"{temp}/runs/{name}", [skipped(), *losses(1.0, 2.0, 3.0)] if name == "b" else losses(1.0, 5.0), name)
    open_report(f"{temp}/runs")
    state = "[document.querySelectorAll('#plot-loss .curve').length, document.querySelector('#plot-loss .skip')" \
            ".getAttribute('d').length > 0, document.getElementById('legend-loss-1').getAttribute('aria-pressed')]"
    check(browser.run(state) == [3, True, "true"], browser.run(state))
    click("legend-loss-1")
    check(browser.run(state) == [2, False, "false"], browser.run(state))
    check(not any("b: " in line for lines in browser.run(f"{SWEEP}('loss')") for line in lines), "a hidden run")
    click("legend-scale-1")
    check(browser.run(state) == [3, True, "true"], browser.run(state))
    for run in range(3):
        click(f"legend-loss-{run}")
    check(browser.run("document.querySelectorAll('.curve').length") == 0, "all runs are off")
    click("legend-loss-0")
    check(browser.run("document.querySelectorAll('#plot-loss .curve').length") == 1, "one is on again")
    check_no_problems()


def test_columns_can_be_sorted(temp):
    values = {"a": 2.0, "b": 10.0, "c": "nan", "d": 1.0}
    for name, value in values.items():
        write_history(f"{temp}/runs/{name}", losses(1.0), name, "finished", results={"score": value})
    open_report(f"{temp}/runs")
    names = "[...document.querySelectorAll('table')[0].querySelectorAll('tr')].slice(1)" \
            ".map(row => row.cells[0].textContent).join('')"
    check(browser.run(names) == "abcd", browser.run(names))
    orders = []
    for _ in range(3):
        click("runs0-by-2")
        orders.append((browser.run(names), browser.run("(document.querySelector('th[aria-sort]') || {}).ariaSort")))
    check(orders == [("badc", "descending"), ("dabc", "ascending"), ("abcd", None)], orders)
    # By keyboard; names are sorted upwards first.
    browser.run("document.getElementById('runs0-by-0').focus()")
    browser.key("Enter", "\r")
    browser.key("Enter", "\r")
    check(browser.run(names) == "dcba", browser.run(names))


def saved(folder, element, name):
    """Clicks a button and returns the contents of the file that it saves."""
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=folder)
    click(element)
    path, end = f"{folder}/{name}", time.time() + 60
    while not os.path.exists(path) and time.time() < end:
        time.sleep(0.05)
    check(os.path.exists(path), (name, os.listdir(folder)))
    with open(path, "rb") as file:
        return file.read()


def test_values_and_pictures_can_be_saved(temp):
    name = "=run, \"x\""
    write_history(f"{temp}/runs/a", [*losses(1.5, 2.5), skipped(loss="nan")], name,
                  layers=[layer_line("w", 2.0, [1], 1)])
    write_history(f"{temp}/runs/b", losses(7.0), "b")
    open_report(f"{temp}/runs")
    rows = saved(temp, "csv-loss", "runs-loss.csv").decode().split("\r\n")
    quoted = "\"'=run, \"\"x\"\"\""
    check(rows == ["run,step,loss,skipped", f"{quoted},1,1.5,0", f"{quoted},2,2.5,0", f"{quoted},3,,1", "b,1,7,0", ""],
          rows)
    check(saved(temp, "csv-runs0", "runs-runs.csv").startswith(b"run,ended,steps,skipped,time\r\n"), "runs")
    rows = saved(temp, "csv-layers", "runs-layers.csv").decode().split("\r\n")
    check(rows[0] == "layer,lost in FP16,subnormal,exactly zero,largest,room" and rows[1].startswith("w,0,0,0,2,14.99929"),
          rows)
    for chart in ("loss", "scale", "norm", "layer"):
        picture = saved(temp, "png-" + chart, f"runs-{chart}.png")
        width, height = struct.unpack(">II", picture[16:24])
        check(picture[:4] == b"\x89PNG" and width > 600 and height > 200, (chart, width, height))
    check_no_problems()


def test_live_page_shows_speed_and_time_left(temp):
    write_history(f"{temp}/run", [{"seconds": 0.25 * i} for i in range(1, 101)], settings={"steps": "900"})
    server = subprocess.Popen([program, "report", f"{temp}/run", "--watch"], stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline()).group(0)
        browser.open(url)
        text = browser.run("document.getElementById('main').innerText")
        check(re.search(r"^4\nsteps per second$", text, re.M), text)
        check("3 min 20 s\nleft of 900 steps" in text, text)
        # The run goes on, faster; the page follows.
        with open(f"{temp}/run/history.jsonl", "a") as file:
            for i in range(1, 501):
                file.write(json.dumps(step_line(100 + i, seconds=25.0 + 0.1 * i)) + "\n")
        end = time.time() + 60
        while "600\nsteps" not in text and time.time() < end:
            time.sleep(0.2)
            text = browser.run("document.getElementById('main').innerText")
        check("30.0 s\nleft of 900 steps" in text and re.search(r"^10\nsteps per second$", text, re.M), text)
        check_no_problems()
    finally:
        server.terminate()
        server.wait()
    open_report(f"{temp}/run")
    text = browser.run("document.getElementById('main').innerText")
    check("left of" not in text and "8\nsteps per second" in text, text)


# ---- the look


def test_page_fits_narrow_and_wide_windows_in_light_and_dark(temp):
    for name in ("first", "second with a long name that goes on"):
        write_history(f"{temp}/runs/{name}", losses(*[1.0 / i for i in range(1, 400)]), name, "finished",
                      results={"final_loss": 0.5, "accuracy": 0.75, "final_scale": 65536.0},
                      layers=[layer_line("layer." * 9 + "weight", 2.0, [5, 1], 0)])
    colours = set()
    for width in (1400, 390):
        for dark in (False, True):
            open_report(f"{temp}/runs", width=width, dark=dark)
            wide, background, cut = browser.run(
                "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor,"
                "[...document.querySelectorAll('button, .note, h2')].filter(one => !one.closest('.wide'))"
                ".filter(one => one.getBoundingClientRect().right > innerWidth).map(one => one.textContent)]")
            check(wide <= width and not cut, (width, wide, cut))
            colours.add(background)
            check_no_problems()
    check(len(colours) == 2, colours)


def test_inspect_hatches_scales_that_overflow_right_of_the_recommendation(temp):
    # One of 10,000 gradients overflows from 2^16 on, a share that no bar can show.
    values = [1e-3] * 9999 + [1.0]
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (10000,), }".ljust(117) + "\n"
    with open(f"{temp}/g.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00\x76\x00" + head.encode() + struct.pack("<10000f", *values))
    result = subprocess.run([program, "inspect", f"{temp}/g.npy", "--html", f"{temp}/g.html"], capture_output=True,
                            text=True)
    check(result.returncode == 0, result.stderr)
    for width in (1400, 390):
        for dark in (False, True):
            browser.open(f"{temp}/g.html", width=width, dark=dark)
            title, hatch, line, label, wide = browser.run("""(() => {
              const box = name => document.querySelector(name).getBoundingClientRect();
              return [document.querySelector('.hatch title').textContent, box('.hatch rect').left,
                      box('.line').right, box('.chosen').right, document.documentElement.scrollWidth];
            })()""")
            check(title == "From 2^16 on, gradients overflow.", title)
            check(label < line < hatch - 30 * min(1, width / 960) and wide <= width, (label, line, hatch, wide))
            check_no_problems()


if chromium.missing():
    finish()
with chromium.Browser() as browser:
    run_tests(globals())
