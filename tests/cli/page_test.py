#!/usr/bin/env python3
"""page_test.py PROGRAM: the report's page in a browser: unusual runs, tooltips, precisions."""
import json
import os
import re

from pages import (
    HEADER,
    SWEEP,
    browser,
    check_no_problems,
    check_sweep,
    click,
    layer_line,
    losses,
    open_report,
    show,
    show_run,
    skipped,
    step_line,
    steps_of,
    write_history,
)
from runs import check, run_tests

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


run_tests(globals())
