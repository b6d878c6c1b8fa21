#!/usr/bin/env python3
"""manners_test.py PROGRAM: suggestions, help, completion, colours, defaults of train, and what Ctrl-C prints."""
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys

from runs import run_tests, wait_for_steps

PROGRAM = os.path.abspath(sys.argv[1])
WITH_TRAINER = os.path.exists(os.path.join(os.path.dirname(PROGRAM), "headroom-train"))
COMMANDS = ["report", "diagnose", "inspect", "policies", "replay", "bench", "completion"]
TRAINER_COMMANDS = ["train", "compare"] if WITH_TRAINER else []


def run(*arguments, **more):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, **more)


def test_typing_errors_get_a_suggestion():
    cases = [(["repaly", "x"], "'replay'"), (["help", "inspekt"], "'inspect'"), (["REPORT"], "'report'"),
             (["replay", "--polcy", "torch", "x"], "'--policy'"), (["inspect", "x", "--formt=fp16"], "'--format'"),
             (["replay", "--policy", "megatrn", "-"], "'megatron'"), (["inspect", "x", "--format", "FP16"], "'fp16'"),
             (["replay", "--policy", "torch:growth_interva=3", "-"], "'growth_interval'"), (["completion", "bsh"], "'bash'")]
    if WITH_TRAINER:
        cases += [(["trian", "mlp"], "'train'"), (["train", "mlp", "--precison", "fp16"], "'--precision'"),
                  (["train", "mlp", "--precision", "FP16"], "'fp16'"), (["train", "mpl"], "'mlp'"),
                  (["train", "mlp", "--loss-scale", "Headroom"], "'headroom'"), (["compare", "--seed5"], "'--seeds'"),
                  (["train", "mlp", "--optimizer", "adma"], "'adam'")]
    for arguments, meant in cases:
        shown = run(*arguments)
        assert shown.returncode == 2 and f"Did you mean {meant}?" in shown.stderr, (arguments, shown)


def test_nothing_is_suggested_for_words_that_resemble_none():
    for arguments in (["qqqqq"], ["replay", "--xyzzy", "1", "-"], ["replay", "--policy", "zzzzzzz", "-"], ["x" * 100000]):
        shown = run(*arguments)
        assert shown.returncode == 2 and "Did you mean" not in shown.stderr, shown


def test_refused_arguments_are_named_with_what_to_do():
    cases = [([], "No command was given; 'headroom --help' lists all."),
             (["--bogus"], "There is no option '--bogus'. 'headroom --help' lists all."),
             (["policies", "extra"], "'extra' is one argument too many; 'headroom policies --help' shows what is expected."),
             (["replay"], "The argument 'trace' is missing; 'headroom replay --help' describes it."),
             (["replay", "-", "--json=maybe"], "--json takes no value."),
             (["replay", "-", "--growth-interval", "x"], "'growth_interval=x' in the policy 'dynamic:growth_interval=x' has a "
              "value that is neither a number nor true, false, skip or throw."),
             (["bench", "--repetitions", "x"], "--repetitions is x; it must be from 1 to 10000."),
             (["bench", "--filter", "a", "--filter", "b"], "--filter was given 2 times; give it once."),
             (["inspect", "x", "--lose", "2"], "--lose is 2; it must be from 0 to 1.")]
    if WITH_TRAINER:
        cases += [(["train", "--lr", "abc"], "--lr is 'abc'; it must be a number."),
                  (["train", "--lr"], "--lr needs a value; 'headroom train --help' describes it."),
                  (["train", "--seed", "-1"], "--seed is -1; it must be 0 or more."),
                  (["train", "--port", "3"], "--port needs --watch.")]
    else:
        cases += [(["train"], "train, compare and bench --libtorch need LibTorch, which this build lacks. In a clone of Headroom, "
                   "use ./run train, which builds with it.")]
    for arguments, sentence in cases:
        shown = run(*arguments)
        assert shown.returncode == 2 and shown.stderr == f"headroom: {sentence}\n", (arguments, shown)


def test_commands_of_the_python_package_are_named():
    for command in ("state", "doctor"):
        shown = run(command, "--json")
        assert shown.returncode == 2 and f"python -m headroom {command}" in shown.stderr, shown
        assert f"\n  {command} " in run("help").stdout


def test_help_has_examples_and_defaults():
    for command in COMMANDS + TRAINER_COMMANDS:
        shown = run("help", command)
        assert shown.returncode == 0 and shown.stdout == run(command, "--help").stdout, (command, shown)
        described, _, examples = shown.stdout.partition("\nExamples:\n")
        assert examples, command
        for option in re.findall(rf"headroom {command}.* (--[a-z-]+)", examples):
            assert f"  {option}" in described, (command, option)
        # One line for each option; long names have their text on the next.
        for text in re.findall(r"^  (--[a-z-]+ [A-Z]{2,}.*(?:\n {20,}.*)?)", described, re.MULTILINE):
            assert "default" in text or re.match(r"--[a-z-]+ [^=]*=\S", text), (command, text)


def test_help_and_version():
    top = run("help")
    assert top.returncode == 0 and top.stdout == run("--help").stdout, top
    for command in COMMANDS:
        assert f"\n  {command} " in top.stdout, command
    assert run("-V").stdout == run("--version").stdout and run("-V").returncode == 0


def completed(*words):
    return run("completion", "candidates", *words).stdout.split()


def test_candidates_follow_the_words_typed():
    assert {"replay", "inspect", "help", "completion"} <= set(completed(""))
    assert "replay" in completed("help", "")
    assert "--policy" in completed("replay", "--")
    assert {"headroom", "torch"} <= set(completed("replay", "--policy", ""))
    assert completed("inspect", "--format", "") == ["fp16", "bf16", "e5m2", "e4m3"]
    assert completed("replay", "") == [], "the shell offers files"
    assert completed("nothing", "") == []
    if WITH_TRAINER:
        assert "--precision" in completed("train", "--p")
        assert "fp16" in completed("train", "--precision", "")
        assert "gpt" in completed("train", "") and "headroom" in completed("compare", "--loss-scale", "")


def test_shells_complete():
    path = {**os.environ, "PATH": os.path.dirname(PROGRAM) + ":" + os.environ["PATH"]}

    def shell(*command):
        return subprocess.run(command, env=path, capture_output=True, text=True, timeout=60)

    shown = shell("bash", "-c", """eval "$(headroom completion bash)"
        COMP_WORDS=(headroom replay --poli) COMP_CWORD=2
        _headroom headroom && echo "${COMPREPLY[@]}"
        COMP_WORDS=(headroom replay --policy '') COMP_CWORD=3
        _headroom headroom && echo "${COMPREPLY[@]}" """)
    assert shown.stdout.split("\n")[0] == "--policy" and "megatron" in shown.stdout, shown
    if shutil.which("zsh"):
        shown = shell("zsh", "-f", "-c", """compdef() { :; }; compadd() { print -r -- "$@"; }; _files() { print files; }
            eval "$(headroom completion zsh)"
            words=(headroom inspect --format ''); CURRENT=4; _headroom
            words=(headroom replay ''); CURRENT=3; _headroom""")
        assert shown.stdout == "-- fp16 bf16 e5m2 e4m3\nfiles\n", shown
    if shutil.which("fish"):
        shown = shell("fish", "--no-config", "-c",
                      "headroom completion fish | source; complete -C 'headroom inspect --format '")
        assert "e4m3" in shown.stdout.split(), shown


def on_terminal(*arguments, **environment):
    """What the program writes to a terminal."""
    terminal, end = pty.openpty()
    subprocess.run([PROGRAM, *arguments], stdin=end, stdout=end, stderr=end, timeout=60,
                   env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **environment})
    os.close(end)
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    return shown.decode()


def test_colours_only_on_terminals_that_want_them():
    assert "\x1b[1;31mheadroom:\x1b[0m" in on_terminal("nothing")
    assert "\x1b" not in on_terminal("nothing", NO_COLOR="1")
    assert "\x1b" not in on_terminal("nothing", TERM="dumb")
    assert "\x1b" in on_terminal("nothing", NO_COLOR=""), "an empty NO_COLOR does not count"
    assert "\x1b" not in run("nothing").stderr


def test_train_defaults_to_fp16_with_the_recommended_policy():
    if not WITH_TRAINER:
        return
    shown = run("train", "mlp", "--steps", "2", "--threads", "1")
    assert shown.stdout.startswith("mlp in fp16, loss scale headroom: 2 of 2 steps"), shown
    shown = run("train", "mlp", "--steps", "2", "--threads", "1", "--precision", "bf16")
    assert shown.stdout.startswith("mlp in bf16, loss scale none:"), shown


def interrupted(folder, *arguments):
    process = subprocess.Popen([PROGRAM, "train", "mlp", "--steps", "1000000", "--threads", "1", "--out", folder, *arguments],
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_steps(process, folder)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, (output, errors)
    return output


def test_ctrl_c_prints_the_command_that_resumes(temp):
    if not WITH_TRAINER:
        return
    folder = f"{temp}/my run"
    printed = interrupted(folder)
    command = shlex.split(printed.split("To resume: ")[1])
    assert command == [PROGRAM, "train", "--out", folder, "--resume"], printed
    done = int(re.search(r": (\d+) of 1000000 steps", printed)[1])
    resumed = subprocess.run([*command, "--steps", str(done + 2)], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0 and f"resuming after step {done}," in resumed.stderr, resumed
    assert "Nothing was saved" in interrupted(f"{temp}/other", "--checkpoint-every", "0")


if __name__ == "__main__":
    run_tests(globals())
