"""Renders pages with Chromium."""
import shutil
import subprocess
import tempfile

from runs import check

CHROMIUM = shutil.which("chromium")


def render(path):
    """The DOM of a page after its scripts ran, without console messages; None if there is no browser."""
    if CHROMIUM is None:
        print("skipped: chromium is not installed")
        return None
    with tempfile.TemporaryDirectory() as profile:
        result = subprocess.run(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", "file://" + path],
            capture_output=True, text=True, timeout=120)
    check("CONSOLE" not in result.stderr, result.stderr[-2000:])
    return result.stdout
