"""``python -m headroom`` runs the program ``headroom`` of this package, or the one in PATH; ``state`` and ``doctor``
are run here."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys


def main() -> None:
    if sys.argv[1:2] == ["state"]:
        from headroom._state_command import main as run_state

        sys.exit(run_state(sys.argv[2:]))
    if sys.argv[1:2] == ["doctor"]:
        from headroom._doctor import main as run_doctor

        sys.exit(run_doctor(sys.argv[2:]))
    packaged = pathlib.Path(__file__).parent / "bin" / "headroom"
    program = str(packaged) if packaged.exists() else shutil.which("headroom")
    if program is None:
        sys.exit("headroom: this package was built without the program; build it with the "
                 "program, or add headroom to PATH.")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
