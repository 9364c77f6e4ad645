"""All commands of `python -m zae`: their help, to the letter, what they share, and what is said of wrong usage.

``python tests/cli/test_commands.py`` writes tests/golden/help.txt anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zae
from zae.cli import COMMANDS, main

GOLDEN = Path(__file__).parent.parent / "golden" / "help.txt"
SCRIPT = """
import sys
from zae.cli import COMMANDS, main
for name in ("", *COMMANDS):
    print("$ python -m zae", *filter(None, [name]), "--help")
    try:
        main([name, "--help"] if name else ["--help"])
    except SystemExit as ended:
        assert ended.code == 0
    print()
print("slow:", *sorted({"torch", "numpy", "zae.trainer"} & set(sys.modules)))
"""


def helps() -> tuple[str, str]:
    """Return the help of all commands, in 80 columns, and which slow modules were imported for it."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    text, _, slow = done.stdout.rpartition("slow:")
    return text, slow.strip()


@pytest.mark.covers("X-14")
def test_the_help_of_every_command() -> None:
    """It does not wait for torch. Newer Pythons write ``-o, --out FILE``, and align the rest by that."""

    def words(text: str) -> str:
        return " ".join(re.sub(r"-(\w) \w+, --", r"-\1, --", text).split())

    text, slow = helps()
    assert slow == ""
    assert words(text) == words(GOLDEN.read_text(encoding="utf-8")), "python tests/cli/test_commands.py writes it anew"
    assert text.count("  --json") == len(COMMANDS)


def test_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, with the nearest name; without one, the help."""
    with pytest.raises(SystemExit, match="2"):
        main(["docter"])
    assert "there is no command 'docter'; did you mean 'doctor'? Commands: doctor, " in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m zae" in capsys.readouterr().err
    for command, words in {
        "plan script.py --lr 3": "unknown arguments: --lr 3; arguments for the script go after --",
        "plan": "are required: script.py:FUNCTION\n",
        "new": "are required: project|addon, NAME\n",
        "doctor --jsn": "usage: python -m zae doctor",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(command.split())
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"zae {zae.__version__}\n"


@pytest.mark.parametrize("command", ["consolidate absent out.pt", "diff absent other", "doctor absent",
                                     "plot absent", "report absent"])  # fmt: skip
def test_what_is_absent_is_said_in_a_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, the name, what to give instead, and nothing on standard output."""
    assert main(command.split()) == 2
    said, error = capsys.readouterr()
    assert said == ""
    assert error.count("\n") == 1
    assert "absent" in error
    assert "; give " in error


if __name__ == "__main__":
    GOLDEN.write_text(f"{helps()[0].rstrip()}\n", encoding="utf-8")
