#!/usr/bin/env python3
"""page_controls_test.py PROGRAM: the controls of the report's page, the files it saves, the live page, and its look."""
import json
import os
import re
import struct
import subprocess
import time

from pages import (
    PROBE,
    SWEEP,
    browser,
    check_no_problems,
    click,
    layer_line,
    losses,
    open_report,
    program,
    show_run,
    skipped,
    step_line,
    write_history,
)
from runs import check, run_tests

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
    check(saved(temp, "csv-runs0", "runs-runs.csv").startswith(b"run,ended,steps,skipped,time,advice\r\n"), "runs")
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


run_tests(globals())
