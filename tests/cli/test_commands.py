"""All commands of `python -m zae`: their help, what they share, and what is said of wrong usage."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import zae
from zae.cli import COMMANDS, main

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


def test_the_help_of_every_command() -> None:
    """It does not wait for torch, and says what the command and each of its arguments does, and the exit status."""
    text, slow = helps()
    assert slow == ""
    overview, *pages = text.split("$ python -m zae ")[1:]
    overview = " ".join(overview.split())
    assert len(pages) == len(COMMANDS)
    for page, (name, what) in zip(pages, COMMANDS.items(), strict=True):
        assert f"{name} {what}" in overview
        assert page.startswith(f"{name} --help\nusage: python -m zae {name} ")
        assert what.lower() in " ".join(page.split()).lower()
        assert "  --json  " in page
        assert re.search(r"exit status:\n  0  \w+", page)
        usage = re.search(r"usage: .*?\n\n", page, re.S)[0]
        for option in re.findall(r"\[(--?\w[\w-]*)", usage):
            described = re.search(rf"^ +(?:-\w[^\n]*, )?{option}\b[^\n]*\s+\w+", page, re.M)
            assert described, f"{name} {option} has no help"


def test_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, with the nearest name; without one, the help."""
    with pytest.raises(SystemExit, match="2"):
        main(["docter"])
    assert "there is no command 'docter'; did you mean 'doctor'? Commands: doctor, " in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m zae" in capsys.readouterr().err
    for command, words in {
        "consolidate a b --lr 3": "unknown arguments: --lr 3\n",
        "consolidate": "are required: path, out\n",
        "doctor --jsn": "usage: python -m zae doctor",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(command.split())
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"zae {zae.__version__}\n"


@pytest.mark.parametrize("command", ["consolidate absent out.pt", "diff absent other", "doctor absent",
                                     "report absent"])  # fmt: skip
def test_what_is_absent_is_said_in_a_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, the name, what to give instead, and nothing on standard output."""
    assert main(command.split()) == 2
    said, error = capsys.readouterr()
    assert said == ""
    assert error.count("\n") == 1
    assert "absent" in error
    assert "; give " in error
